"""Make the schemas of this folder anew, each where its program is installed or at hand.

python make.py sky                      in an environment with skypilot (0.14.1)
python make.py dstack                   in one with dstack (0.22.5)
python make.py CRD.yaml EXAMPLE.yaml    config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of
                                        kubernetes-sigs/jobset, and manifests/base/crds/
                                        trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer

Descriptions are left out. Of the Kubernetes schemas, which have hundreds of kilobytes, what an example has is
kept, and nothing else is allowed.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def bare(schema: Any) -> Any:
    """A schema without its texts."""
    if isinstance(schema, dict):
        texts = ("description", "title")
        return {k: bare(v) for k, v in schema.items() if not (k in texts and isinstance(v, str))}
    return [bare(item) for item in schema] if isinstance(schema, list) else schema


def used(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """A structural schema with the properties that ``value`` has, and no others allowed."""
    found = {k: v for k, v in schema.items() if not k.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": schema["anyOf"]}
    if "properties" in schema and isinstance(value, dict):
        known = {k: v for k, v in schema["properties"].items() if k in value}
        found["properties"] = {k: used(v, value[k]) for k, v in known.items()}
        found["additionalProperties"] = False
    if "items" in schema and value:
        merged: dict[str, Any] = {}
        for item in value:
            merged = _both(merged, used(schema["items"], item))
        found["items"] = merged
    return found


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    properties = {**one.get("properties", {}), **other.get("properties", {})}
    return {**one, **other, **({"properties": properties} if properties else {})}


def main(program: str, *example: str) -> None:
    """Write one schema."""
    if program == "sky":
        schemas: Any = import_module("sky.utils.schemas")

        task = schemas.get_task_schema()
        for key in ("config", "service", "pool"):
            del task["properties"][key]
        found = {**task, "properties": {**task["properties"], "resources": schemas.get_resources_schema()}}
    elif program == "dstack":
        models: Any = import_module("dstack._internal.core.models.configurations")
        found = models.TaskConfiguration.model_json_schema()
    else:
        import yaml

        definition = yaml.safe_load(Path(program).read_text())
        whole = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        whole["properties"]["metadata"] = {"type": "object"}
        found = used(whole, yaml.safe_load(Path(example[0]).read_text()))
        program = definition["spec"]["names"]["singular"]
    out = Path(__file__).with_name(f"{program}.json")
    out.write_text(json.dumps(bare(found), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
