"""JSON Schema's own test suite as a corpus: each schema is refused by name, or everything that it lets out is valid.

tests/bench/schema_corpus.py --walks 3

The suite comes with the source package of `jsonschema`, which also judges: both are installed from the package index
into build/corpus. What the suite calls invalid must not be taken by a schema that is, and each random walk through its
masks must end in a value that the schema allows (`cut`: it was longer than --bytes).
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.request.sampling_validation import check_constraint
from octavo.text.grammar import check_grammar, grammar_of, limits

PACKAGE = "jsonschema==4.26.0"
FOLDER = Path(__file__).parents[2] / "build" / "corpus"
DRAFTS = ("draft2020-12", "draft2019-09", "draft7")
END = 0  # of a text, in the vocabulary of bytes that llguidance has
BYTES = LLTokenizer("byte")


def fetch() -> Path:
    """Installs the judge, and returns the source package with the suite."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not (FOLDER / "lib").exists():
        subprocess.run([*pip, "download", "--no-deps", "--no-binary", "jsonschema", "-d", FOLDER, PACKAGE], check=True)
        subprocess.run([*pip, "install", "--target", FOLDER / "lib", PACKAGE], check=True)
    sys.path.insert(0, str(FOLDER / "lib"))
    return next(FOLDER.glob("*.tar.gz"))


def groups(package: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """The draft, the schema and the tests of each group; each schema once."""
    seen = set()
    with tarfile.open(package) as archive:
        for member in archive:
            parts = member.name.split("/")
            if parts[1:3] != ["json", "tests"] or parts[3] not in DRAFTS or not member.name.endswith(".json"):
                continue
            content = archive.extractfile(member)
            for group in json.load(content) if content else []:
                schema = group["schema"]
                if isinstance(schema, dict) and parts[3] == "draft7":
                    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
                text = json.dumps({**schema, "$schema": ""} if isinstance(schema, dict) else schema, sort_keys=True)
                if text not in seen:
                    seen.add(text)
                    yield parts[3], schema, group["tests"]


class Taken:
    """A schema that is taken: what it lets out."""

    def __init__(self, constraint: Constraint, draft: str, schema: Any) -> None:
        import jsonschema

        judges = {"draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator}
        self._judge = judges.get(draft, jsonschema.Draft202012Validator)(schema)
        self._start = LLMatcher(BYTES, grammar_of(constraint), log_level=0, limits=limits())
        self.slowest_s = 0.0

    def lets_out(self, value: Any) -> bool:
        """Whether the value, as JSON of one line, is a whole output."""
        matcher, text = self._start.deep_copy(), list(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()

    def walk(self, chance: random.Random, num_bytes: int) -> str:
        """What becomes of a random output."""
        matcher, text = self._start.deep_copy(), bytearray()
        while len(text) < num_bytes:
            began = time.thread_time()
            mask = matcher.compute_bitmask()
            self.slowest_s = max(self.slowest_s, time.thread_time() - began)
            if matcher.is_error():
                return "outputs that become too complex"
            open_bytes = [8 * place + bit for place, each in enumerate(mask) for bit in range(8) if each >> bit & 1]
            ends = matcher.is_accepting()
            plain = [each for each in open_bytes if 32 <= each < 127]
            chosen = chance.choice(plain or [each for each in open_bytes if each < 256] or [END])
            if ends and (not plain or chance.random() < 0.5):
                break
            if matcher.try_consume_tokens([chosen]) != 1:
                return "outputs without a next byte"
            text.append(chosen)
        else:
            return "outputs cut"
        try:
            if self._judge.is_valid(json.loads(text)):
                return "outputs valid"
        except re.error:
            return "outputs whose pattern the judge cannot read"
        except ValueError:
            pass
        print("INVALID", self._judge.schema, text.decode(errors="replace"))
        return "outputs INVALID"


def is_named(message: str, schema: Any) -> bool:
    """Whether a refusal has a keyword or a value of the schema."""
    words, said = json.dumps(schema, ensure_ascii=False).lower(), message.lower()
    if not isinstance(schema, dict) or re.search(r"\"\$\w+\"|format: \S", said):  # perhaps of what it refers to
        return True
    return any(word in words for word in re.findall(r"\w{5,}|\"\w+\"", said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=400)
    asked = parser.parse_args()
    found, slowest, unnamed = Counter[str](), [0.0, 0.0], list[str]()
    for draft, schema, tests in groups(fetch()):
        constraint = Constraint(Shape.JSON_SCHEMA, json.dumps(schema))
        found["schemas"] += 1
        began = time.thread_time()
        try:
            check_constraint(constraint)
            check_grammar(constraint)
        except InvalidArgument as error:
            named = is_named(error.message, schema)
            found["refused by name" if named else "refused WITHOUT a name"] += 1
            unnamed += [] if named else [f"{error.message} {constraint.text[:200]}"]
            continue
        finally:
            slowest[0] = max(slowest[0], time.thread_time() - began)
        found["taken"] += 1
        taken = Taken(constraint, draft, schema)
        for test in tests:
            found[f"the suite's {'valid' if test['valid'] else 'invalid'} values"] += 1
            if taken.lets_out(test["data"]):
                found[f"of its {'valid' if test['valid'] else 'INVALID'} values let out"] += 1
                if not test["valid"]:
                    print("LET OUT", draft, constraint.text, json.dumps(test["data"]))
        for number in range(asked.walks):
            found[taken.walk(random.Random(f"{constraint.text} {number}"), asked.bytes)] += 1
        slowest[1] = max(slowest[1], taken.slowest_s)
    print(*unnamed, *(f"{count:6} {what}" for what, count in found.items()), sep="\n")
    print(f"slowest check {1000 * slowest[0]:.1f} ms, slowest mask {1000 * slowest[1]:.1f} ms (CPU of the thread)")


if __name__ == "__main__":
    main()
