"""A child process: gcp-storage-emulator, which ignores conditions and knows of one generation, with
what Google documents of both.

    python serve_google.py start ...

An object is given by its own generation alone, is not made where `ifGenerationMatch=0` and there is
one, and an upload can be ended.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from gcp_storage_emulator import server
from gcp_storage_emulator.__main__ import main
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

Handler = Callable[..., Any]


class Ended:
    """What the emulator writes of a status, which is none of Python's."""

    value, phrase = 499, "Client Closed Request"


def generation(storage: Any, bucket: str, name: str) -> str | None:
    try:
        found: str = storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return None
    return found


def of_one_generation(real: Handler) -> Handler:
    def answer(request: Any, response: Any, storage: Any) -> None:
        asked = request.query.get("generation")
        where = request.params["bucket_name"], request.params["object_id"]
        if asked and asked[0] != generation(storage, *where):
            response.status = HTTPStatus.NOT_FOUND
        else:
            real(request, response, storage)

    return answer


def on_condition(real: Handler) -> Handler:
    def answer(request: Any, response: Any, storage: Any) -> None:
        named = request.query.get("name") or [request.data["meta"]["name"]]
        there = generation(storage, request.params["bucket_name"], named[0])
        if request.query.get("ifGenerationMatch") == ["0"] and there:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            real(request, response, storage)

    return answer


def end(request: Any, response: Any, storage: Any) -> None:
    response.status = Ended


for _, handlers in server.HANDLERS:
    for method, handler in handlers.items():
        if handler in (objects.get, objects.download):
            handlers[method] = of_one_generation(handler)
        elif handler is objects.insert:
            handlers[method] = on_condition(handler)
    if objects.upload_partial in handlers.values():
        handlers["DELETE"] = end

main()
