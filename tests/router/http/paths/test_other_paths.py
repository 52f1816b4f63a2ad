"""Paths of other servers are 404, and say what to use instead."""

from router.http.paths.other_paths import BELOW, INSTEAD


async def test_each_says_what_to_use(world, connect):
    await world.start()
    connection = await connect()
    paths = {**INSTEAD, **{f"{path.rstrip('/')}/x": what for path, what in BELOW.items()}, "/nothing": "no such path"}
    for path, what in paths.items():
        connection.send("POST", path, {})
        answer = await connection.answer()
        assert answer.status == (405 if path.startswith("/v1/responses/") else 404), path  # an id may stand there
        assert answer.object["error"]["message"] == f"POST {path}: {what}"
