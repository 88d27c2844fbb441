"""Records ten updates of published optimizers of matrices, in float32.

pip install pytorch-optimizer==4.1.0 torch
TORCHDYNAMO_DISABLE=1 python tests/optim/golden/update_matrices.py NANOGPT DION

NANOGPT is a copy of github.com/KellerJordan/modded-nanogpt, whose records have a copy of
github.com/facebookresearch/optimizers. DION is a copy of github.com/microsoft/dion.
"""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import torch
from pytorch_optimizer import SOAP

RECORDS = Path(sys.argv[1]) / "records/track_3_optimization/results"
sys.path += [str(RECORDS / "20260513_shampoo_1_4_power"), sys.argv[2]]
from dion.dion_simple import dion_update  # noqa: E402
from distributed_shampoo import (  # noqa: E402
    AdamPreconditionerConfig,
    DistributedShampoo,
    RootInvShampooPreconditionerConfig,
    SingleDeviceDistributedConfig,
)

SQUARE, WIDE = (8, 8), (6, 10)
ONE_SIDE = {2: {0: 0.5, 1: 0.0}}  # of matrices: the exponent of rows, none for columns


def soap(largest):
    return lambda p: SOAP(
        p, lr=0.1, weight_decay=0, precondition_frequency=3, max_precondition_dim=largest
    )


def shampoo(**exponents):
    return lambda p: DistributedShampoo(
        p, lr=0.1, betas=(0.9, 0.95), precondition_frequency=3,
        grafting_config=AdamPreconditionerConfig(beta2=0.95, epsilon=1e-8),
        distributed_config=SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
        preconditioner_config=RootInvShampooPreconditionerConfig(**exponents),
    )  # fmt: skip


class SoapMuon:
    """The record of 2,750 steps, without parts that look at weights; the size of our updates."""

    def __init__(self, parameters):
        text = (RECORDS / "20260609_soap_f1_auxb2_clean/train_gpt_clean_SOTA.py").read_text()
        functions = ("def soap_", "def _ns_inner", "def zeropower_")
        settings = ("SOAP_BETA2", "SOAP_PRECONDITION", "SOAP_DENOM")
        body = ast.parse(text).body
        parts = [node for node in body if ast.unparse(node).startswith(functions + settings)]
        self.record = {"torch": torch, "Tensor": torch.Tensor}
        exec(compile(ast.Module(parts, []), "record", "exec"), self.record)
        # Our bound of the largest singular value: small ones depend on it after twelve iterations.
        self.record["gram_frobenius_norm_estimate"] = lambda x, **options: 1.01 * x.norm()
        [self.parameter] = parameters
        rows, columns = self.parameter.shape
        self.momentum = torch.zeros_like(self.parameter)
        self.state = {
            "exp_avg_sq": torch.zeros(rows, columns), "row_gg": torch.zeros(rows, rows),
            "col_gg": torch.zeros(columns, columns), "q_row": None, "q_col": None, "soap_step": 0,
        }  # fmt: skip

    @torch.no_grad()
    def step(self):
        gradient = self.parameter.grad
        self.momentum.lerp_(gradient, 0.05)
        update = gradient.lerp(self.momentum, 0.95)
        update = self.record["soap_precondition_momentum"](update, self.state)
        update = self.record["zeropower_via_newtonschulz5"](update)
        self.parameter -= 0.1 * 0.2 * max(update.shape) ** 0.5 * update
        self.record["soap_update_preconditioner"](gradient, self.state)


class Dion:
    """Rank 3, with the size of our updates, and the first Q that the test has."""

    def __init__(self, parameters):
        [self.parameter] = parameters
        rows, columns = self.parameter.shape
        self.momentum = torch.zeros_like(self.parameter)
        right = np.random.default_rng(1).normal(size=(columns, 3)).astype(np.float32)
        self.right, self.rate = torch.tensor(right), 0.1 * 0.2 * columns / rows**0.5

    @torch.no_grad()
    def step(self):
        dion_update(
            self.parameter, self.parameter.grad, self.momentum, self.right, self.rate, 0.95, 0.0
        )


CASES = {
    "soap": (SQUARE, soap(10_000)),
    "soap, one side": (WIDE, soap(8)),
    "shampoo": (WIDE, shampoo()),
    "shampoo, one side": (WIDE, shampoo(inverse_exponent_override=ONE_SIDE)),
    "soap_muon": (SQUARE, SoapMuon),
    "dion": (WIDE, Dion),
}

torch.Tensor.bfloat16 = torch.Tensor.float  # the record orthogonalizes in bfloat16
found = {}
for name, (shape, make) in CASES.items():
    weight, *gradients = np.random.default_rng(0).normal(size=(11, *shape)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    found[name] = parameter.detach().numpy().tolist()
Path(__file__).with_name("matrices.json").write_text(json.dumps(found) + "\n")
