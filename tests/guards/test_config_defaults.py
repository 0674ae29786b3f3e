"""What people read of our keys, in the YAML and in the documents, is what the code says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from partial_rollout.settings import __main__ as documents
from partial_rollout.settings.block import PartialRolloutConfig, field_keys

if TYPE_CHECKING:
    from pathlib import Path

AGAIN = "run `python -m partial_rollout.settings write`"


def test_the_yaml_of_the_defaults_is_the_one_that_is_made_from_the_descriptions(repository: Path):
    text = (repository / documents.YAML_PATH).read_text(encoding="utf-8")
    assert text == documents.yaml(), AGAIN
    assert yaml.safe_load(text) == PartialRolloutConfig().to_mapping()


def test_the_table_in_the_documents_is_the_one_that_is_made_from_the_descriptions(repository: Path):
    text = (repository / documents.TABLE_PATH).read_text(encoding="utf-8")
    assert text == documents.with_table(text), AGAIN


def test_the_table_of_what_is_supported_is_the_one_that_doctor_speaks_from(repository: Path):
    text = (repository / documents.SUPPORT_PATH).read_text(encoding="utf-8")
    assert text == documents.with_table(text, documents.SUPPORT), AGAIN


def test_the_short_table_of_the_readme_is_made_from_the_same(repository: Path):
    text = (repository / documents.README_PATH).read_text(encoding="utf-8")
    assert text == documents.with_table(text, documents.SUMMARY), AGAIN


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        documents.with_table("no table here")


@pytest.mark.parametrize("key", list(field_keys()))
def test_a_key_says_what_it_means_who_needs_it_and_what_speaks_for_it(key: str):
    item = field_keys()[key]
    assert item.description
    assert isinstance(item.json_schema_extra, dict)
    assert all(item.json_schema_extra[name] for name in ("who", "evidence"))


def test_no_two_keys_have_the_same_evidence():
    evidence = [item.json_schema_extra["evidence"] for item in field_keys().values()]
    assert [said for said in sorted(set(evidence)) if evidence.count(said) > 1] == []
