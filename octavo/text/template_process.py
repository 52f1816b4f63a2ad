"""The process in which chat templates run, one after another: the script of `octavo.text.template_renderer`.

A request is a JSON object: `key` names a template, `source` and `variables` are there when the process has not compiled
it yet, `values` when it is to be rendered. The answer is a text.
"""

import json
import os
import sys


def main() -> None:
    socket = os.fdopen(0, "rb")
    sys.path[:] = json.loads(socket.readline())

    from octavo.process.helper_loop import serve
    from octavo.text.template_sandbox import TemplateTable, message_of

    templates = TemplateTable()
    serve(
        socket,
        lambda request: templates.answer(json.loads(request)).encode("utf-8", "surrogatepass"),
        message_of,
    )


if __name__ == "__main__":
    main()
