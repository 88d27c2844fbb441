"""Manifests of clusters/ have the fields of Kubernetes' published API, of which its client is
made."""

import re

import pytest
import yaml
from forked_processes import ROOT
from kubernetes.client import models

MANIFESTS = sorted((ROOT / "clusters").glob("*.yaml"))
# JobSet is not in Kubernetes; of it the templates of its jobs are.
OBJECTS = [
    (f"{file.name}: {each['kind']}", each)
    for file in MANIFESTS
    for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    if each.get("kind")
]


def unknown(content, kind, where=""):
    """The fields of `content` that `kind`, the client's name of a type, has not."""
    if several := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        inside = [(each, several[1], f"{where}[{i}]") for i, each in enumerate(content)]
    elif (model := getattr(models, kind, None)) is None:  # plain, or a mapping of such
        return []
    else:
        types = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
        if absent := [f"{where}.{name}" for name in content if name not in types]:
            return absent
        inside = [(content[name], types[name], f"{where}.{name}") for name in content]
    return [field for each in inside for field in unknown(*each)]


def check(content, kind):
    """Raises ValueError for an unknown field, for one that is missing, and for a wrong type."""
    if fields := unknown(content, kind):
        raise ValueError(f"there is no {fields[0]}")
    getattr(models, kind).model_validate(content)


def with_quantities(content):
    """Kubernetes reads a quantity from a number as from a text."""
    if isinstance(content, list):
        return [with_quantities(each) for each in content]
    if not isinstance(content, dict):
        return content
    return {
        name: {key: str(value) for key, value in inside.items()}
        if name in ("limits", "requests")
        else with_quantities(inside)
        for name, inside in content.items()
    }


@pytest.mark.parametrize(("name", "content"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_it_has_the_fields_of_the_published_api(name, content):
    content = with_quantities(content)
    if content["kind"] == "JobSet":
        for job in content["spec"]["replicatedJobs"]:
            check(job["template"], "V1JobTemplateSpec")
    else:
        check(content, f"V1{content['kind']}")


RULE = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"exitCodes": 1}, "there is no .exitCodes"),
        ({"onExitCodes": {"operator": "In", "value": [2]}}, "there is no .onExitCodes.value"),
        ({"onExitCodes": {"operator": "In", "values": ["2"]}}, "valid integer"),
        ({"action": None}, "action"),
    ],
)
def test_what_is_wrong_is_seen(change, told):
    check(RULE, "V1PodFailurePolicyRule")
    with pytest.raises(ValueError, match=told):
        check(RULE | change, "V1PodFailurePolicyRule")
