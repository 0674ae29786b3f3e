"""What scripts/setup_cpu.sh tells uv of pip's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "uv_settings.py"


def run(tmp_path, config, **variables):
    """The shell that has evaluated the script's lines; its output is its environment."""
    (tmp_path / "pip.conf").write_text(config)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    # Files of the machine and of its user would count too.
    places = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "XDG_CONFIG_DIRS": str(tmp_path), "HOME": str(tmp_path)}
    environment = kept | places | variables
    command = f'lines=$({sys.executable} {SCRIPT}) && eval "$lines" && env -0'
    return subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True)


def exported(tmp_path, config, **variables):
    """The script's lines as a shell understands them."""
    result = run(tmp_path, config, **variables)
    assert result.returncode == 0, result.stderr
    return dict(entry.split("=", 1) for entry in result.stdout.split("\0") if "=" in entry)


def test_pips_places_become_uvs(tmp_path):
    config = """[global]
index-url = https://user:pass=word@host/simple
find-links = /some/wheels
    /more/wheels
constraint = /c.txt
"""
    seen = exported(tmp_path, config, PIP_EXTRA_INDEX_URL="file:///a/simple https://b/simple", PIP_DEFAULT_TIMEOUT="77")
    assert seen["UV_DEFAULT_INDEX"] == "https://user:pass=word@host/simple"
    assert seen["UV_FIND_LINKS"] == "/some/wheels,/more/wheels"
    assert seen["UV_INDEX"] == "file:///a/simple https://b/simple"
    assert seen["UV_HTTP_TIMEOUT"] == "77"
    assert seen["UV_CONSTRAINT"] == "/c.txt"
    assert seen["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_a_variable_overrides_a_file_and_uvs_own_variable_both(tmp_path):
    config = "[global]\nfind-links = /in/file\ncert = /cert/in/file\n"
    seen = exported(tmp_path, config, PIP_FIND_LINKS="/in/variable", SSL_CERT_FILE="/own")
    assert seen["UV_FIND_LINKS"] == "/in/variable"
    assert seen["SSL_CERT_FILE"] == "/own"


def test_values_are_no_commands(tmp_path):
    seen = exported(tmp_path, "[global]\nfind-links = /a;touch${IFS}x\n")
    assert seen["UV_FIND_LINKS"] == "/a;touch${IFS}x"
    assert not (tmp_path / "x").exists()


def test_other_commands_settings_are_not_taken(tmp_path):
    assert "UV_DEFAULT_INDEX" not in exported(tmp_path, "[download]\nindex-url = https://other/simple\n")


def test_what_only_pip_can_follow_is_named(tmp_path):
    result = run(tmp_path, "[global]\nno-index = true\nretries = 1\n[install]\nrequire-hashes = true\n")
    assert result.returncode != 0
    assert "uv does not know pip's no-index, require-hashes" in result.stderr


def test_nothing_set_leaves_uv_its_defaults(tmp_path):
    seen = exported(tmp_path, "")
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"} & set(seen)
