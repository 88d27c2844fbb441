"""Says how a run streams a Hugging Face data set; it streams nothing itself.

In the file of an experiment:

    cfg.data = fdl.Config(
        HFStream, "allenai/c4", TOKENIZER, batch_size=64, sequence_length=1024, name="en"
    )

`HFStream` of `data_tools.hf_stream` reads, tokenizes and packs the data set while the run trains.
docs/data.md says more; `python -m data_tools.pretokenize` makes flat tokens of it instead.
"""

from collections.abc import Sequence

from data_tools import command_line


def explain(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    raise ValueError(
        "a run streams the data set, not this command: see --help, or make flat tokens of it with "
        "`python -m data_tools.pretokenize`"
    )


if __name__ == "__main__":
    command_line.run("hf_stream", explain)
