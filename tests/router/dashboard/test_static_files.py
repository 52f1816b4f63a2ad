"""The page loads nothing from elsewhere and nothing inline; a file that has not changed is not sent again."""

import re
from importlib.resources import files

import pytest
from starlette.requests import Request

from router.dashboard.dashboard import FILES, POLICY, StaticFile

FOLDER = files("router.dashboard")
TEXTS = {name: (FOLDER / name).read_text() for name, _ in FILES.values()}


def request_with(**headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


async def test_a_file_is_answered_with_a_strict_policy():
    answer = await StaticFile("dashboard.html", "text/html; charset=utf-8").answer(request_with())
    assert answer.status_code == 200
    assert answer.body.decode() == TEXTS["dashboard.html"]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    directives = dict(each.strip().split(" ", 1) for each in POLICY.split(";"))
    assert directives["default-src"] == directives["frame-ancestors"] == directives["base-uri"] == "'none'"
    assert {directives[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}


async def test_an_unchanged_file_is_not_sent_again():
    file = StaticFile("dashboard.js", "text/javascript")
    tag = (await file.answer(request_with())).headers["etag"]
    again = await file.answer(request_with(if_none_match=tag))
    assert (again.status_code, again.body) == (304, b"")
    assert (await file.answer(request_with(if_none_match='"old"'))).status_code == 200
    assert (await StaticFile("dashboard.css", "text/css").answer(request_with())).headers["etag"] != tag


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_comes_from_elsewhere(name):
    """The names of XML namespaces are no addresses: nobody fetches them."""
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9]", re.sub(r"(?m)(^|\s)// .*$|/\*.*?\*/", "", text))
    assert "@import" not in text


def test_the_markup_has_nothing_inline():
    page = TEXTS["dashboard.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)


def test_texts_never_become_markup():
    """What a client has chosen, such as the name of a request, is put into the page as text."""
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", TEXTS["dashboard.js"]
    )


def test_the_three_files_fit_together():
    page, script, style = (TEXTS[f"dashboard.{kind}"] for kind in ("html", "js", "css"))
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    asked = set(re.findall(r'\$\("([a-z0-9-]+)"\)', script))
    assert asked <= ids
    assert set(re.findall(r"#([a-z][a-z-]*)(?=[^;{}]*\{)", style)) <= ids
    for table in re.findall(r"<table.*?</thead>", page, re.DOTALL):
        assert table.count('scope="col"') == table.count("<th ") > 0
