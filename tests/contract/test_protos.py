"""What the .proto files promise beyond what buf checks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from octavo.internal.v1 import transfer_pb2, worker_pb2
from octavo.request.errors import Code
from octavo.v1 import admin_pb2, inference_pb2, types_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
FILES = sorted(PROTOS.glob("octavo/**/*.proto"), key=lambda path: path.stem)
MODULES = (types_pb2, inference_pb2, admin_pb2, worker_pb2, transfer_pb2)
RPC = re.compile(r"((?:^ *//.*\n)*)^ *rpc (\w+)\(", re.MULTILINE)
ROW = re.compile(r"^\* ([A-Z_]+): (.+)", re.MULTILINE)
CODES = {code.name for code in Code}
NO_TABLE = "Statuses as Generate"


def comment_of(lines):
    return "\n".join(line.strip().removeprefix("//").removeprefix(" ") for line in lines.splitlines())


def rpcs():
    for path in FILES:
        for match in RPC.finditer(path.read_text(encoding="utf-8")):
            yield pytest.param(comment_of(match[1]), id=f"{path.stem}.{match[2]}")


def buf(*arguments, cwd=PROTOS):
    binary = Path(sys.executable).with_name("buf")
    if not binary.exists():
        pytest.skip("buf is not installed")
    return subprocess.run([binary, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_a_change_that_breaks_clients_is_found(tmp_path):
    """Both ways: the contract as it is breaks nothing, and each of these changes is found."""
    against = ("--against", PROTOS / "v1.baseline.binpb", "--path", "octavo/v1")
    assert buf("breaking", *against).stdout == ""
    inference = PROTOS / "octavo/v1/inference.proto"
    for before, after in (
        ("string text = 3;", "bytes text = 3;"),
        ("optional string model = 2;", "optional string model = 22;"),
        ("rpc Cancel(CancelRequest)", "rpc Stop(CancelRequest)"),
    ):
        shutil.copytree(PROTOS, tmp_path, dirs_exist_ok=True)
        text = inference.read_text()
        assert before in text
        (tmp_path / "octavo/v1/inference.proto").write_text(text.replace(before, after, 1))
        done = buf("breaking", *against, cwd=tmp_path)
        assert (done.returncode, bool(done.stdout)) == (100, True), (before, done.stderr)


@pytest.mark.parametrize("comment", list(rpcs()))
def test_every_rpc_says_what_can_go_wrong(comment):
    assert re.match(r"[A-Z][a-z]+s ", comment), "begins with a verb: what it does"
    rows = ROW.findall(comment)
    assert rows or NO_TABLE in comment
    for code, text in rows:
        assert code in CODES
        assert text


def test_scalars_with_another_default_than_zero_are_optional():
    """The default is read from the comment: "default 1", "Default true"."""
    found = 0
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        fields = re.findall(r"((?:^ *//.*\n)+)^ *((?:optional )?[a-z]\w+ \w+) = \d+;$", text, re.MULTILINE)
        for lines, declaration in fields:
            default = re.search(r"\b[Dd]efault:? (\w+)", comment_of(lines))
            if default and default[1] not in ("0", "false"):
                found += 1
                assert declaration.startswith("optional "), (path.name, declaration)
    assert found >= 8


def test_java_can_compile_its_stubs():
    """Java's accessors of a string `x` are getX and getXBytes, those of an enum getX and getXValue."""
    suffixes = {FieldDescriptor.TYPE_STRING: "_bytes", FieldDescriptor.TYPE_ENUM: "_value"}
    for module in MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            taken = {field.name + suffixes[field.type] for field in message.fields if field.type in suffixes}
            assert not taken & set(message.fields_by_name), message.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_names_its_code_in_other_languages(path):
    text = path.read_text()
    assert "internal" in path.parts or "octavo.internal" not in text
    package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)[1]
    dotted = ".".join(part.capitalize() for part in package.split("."))
    php, go = dotted.replace(".", "\\\\"), f"{package.replace('.', '/')};{package.replace('.', '')}"
    for name, value in {"go_package": go, "java_package": f"dev.{package}", "csharp_namespace": dotted,
                        "php_namespace": php, "ruby_package": dotted.replace(".", "::")}.items():  # fmt: skip
        assert f'option {name} = "{value}";' in text
    assert "option java_multiple_files = true;" in text
    assert re.search(r'^option objc_class_prefix = "OC[A-Z]";', text, re.MULTILINE)
