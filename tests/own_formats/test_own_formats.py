"""Our own files have golden bytes; damaged ones are one clear error, never a value."""

import base64
import json

import jsonschema
import pytest

from elastic_ckpt.core import errors
from tests import own_formats
from tests.conftest import GOLDEN

JSON = {name: each for name, each in own_formats.OWN.items() if each.is_json}


@pytest.fixture(params=own_formats.OWN)
def own(request):
    return own_formats.OWN[request.param]


def put(own, directory, content):
    """Writes the content to the file; returns its path."""
    path = directory / own.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(own, directory, content):
    """The error of a file; none for one that counts as lost."""
    path = put(own, directory, content)
    if own.lost is not None:
        assert own.read(directory) == own.lost
        return ""
    with pytest.raises(errors.ElasticCkptError, match=str(directory)) as raised:
        own.read(directory)
    message = str(raised.value)
    assert path.name in message
    assert "\n" not in message
    return message


def test_these_bytes_are_written(own, golden, tmp_path):
    content = own.written(tmp_path)
    text = content if own.is_json else base64.encodebytes(content)
    golden(own.golden, text.decode())


def test_the_golden_file_is_read(own, tmp_path):
    put(own, tmp_path, own.golden_bytes(GOLDEN))
    assert own.read(tmp_path) == own.value


def test_a_damaged_file_is_refused_by_its_name(own, tmp_path):
    for content in own_formats.damages(own.golden_bytes(GOLDEN)).values():
        refused(own, tmp_path, content)


@pytest.mark.parametrize("name", JSON)
def test_another_version_and_other_json_are_refused(name, tmp_path):
    own = JSON[name]
    for kind, content in own_formats.other_json(own.golden_bytes(GOLDEN)).items():
        message = refused(own, tmp_path, content)
        if "version" in kind and message:
            assert "this release reads version 1" in message
            assert ("later version of elastic_ckpt" in message) == ("later" in kind)


@pytest.mark.parametrize("name", JSON)
def test_a_field_that_is_not_known_changes_no_value(name, tmp_path):
    own = JSON[name]
    put(own, tmp_path, own_formats.with_unknown_field(own.golden_bytes(GOLDEN)))
    assert own.read(tmp_path) == own.value


@pytest.mark.parametrize("name", [name for name, own in JSON.items() if own.schema])
def test_the_schema_takes_the_golden_file_and_no_other_field(name):
    own = JSON[name]
    schema = json.loads(own.schema.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    content = own.golden_bytes(GOLDEN)
    jsonschema.validate(json.loads(content), schema)
    changed = [own_formats.with_unknown_field(content)]
    changed += own_formats.other_json(content).values()
    for each in changed[:3]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(each), schema)


@pytest.mark.parametrize("name", [name for name, own in JSON.items() if own.page])
def test_the_page_names_every_field(name):
    own = JSON[name]
    page = own.page.read_text()
    fields = json.loads(own.golden_bytes(GOLDEN))
    nested = [fields.get(key, {}) for key in ("host", "fragments")]
    names = {name for each in (fields, *nested) for name in each}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
