"""The schemas of the documentation are those of the records, and results obey them."""

import json
from pathlib import Path

import pytest

from tools.schemas import FOLDER, schemas

SCHEMAS = schemas()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_in_the_documentation_is_that_of_the_record(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == SCHEMAS[name], "run tools/schemas.py"


def test_every_schema_is_listed_and_none_is_left_over():
    page = (Path(FOLDER).parent / "json.md").read_text(encoding="utf-8")
    assert {path.name for path in FOLDER.glob("*.json")} == set(SCHEMAS)
    assert all(f"schemas/{name}" in page for name in SCHEMAS)


def test_an_inspection_obeys_its_schema_and_a_wrong_one_does_not(demo_inspection):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMAS["tieline-inspection.v1.json"])
    values = demo_inspection.to_dict()
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"verdict": 3}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({k: v for k, v in values.items() if k != "metrics"}, schema)


@pytest.fixture(scope="module")
def demo_inspection():
    import tieline

    return tieline.inspect("demo", tokens=256)
