"""docs/responses.md: its example runs, with OpenAI's own package."""

import asyncio
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs/responses.md"


async def test_the_example_runs(world, call, templates, capsys):
    await world.start(routers=2)
    ((code),) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("127.0.0.1:58051", world.routers[1].http_endpoint).replace("smollm2", "fake")
    found = {}
    await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), found)
    found["client"].close()
    assert capsys.readouterr().out
    assert found["ended"]
    assert found["again"].previous_response_id == found["name"]
    assert (await call("GET", f"/v1/responses/{found['name']}")).status == 404
    assert (await call("GET", f"/v1/responses/{found['again'].id}")).object["status"] == "incomplete"
