"""Corrects FastAPI's OpenAPI document: status 400 instead of 422, error bodies, streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
# Endpoints whose response is the status only.
_WITHOUT_BODY = ("/health", "/readiness", "/liveness")


def describe_truly(app: FastAPI) -> None:
    """Make ``/openapi.json`` describe errors and streams. Call it after all routes are added."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(make())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    for path, methods in document["paths"].items():
        for operation in methods.values():
            _describe_operation(path, operation["responses"])
    return document


def _describe_operation(path: str, responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    if path in _WITHOUT_BODY:
        responses["200"] = {"description": "It is."}
        responses["503"] = {"description": "It is not."}
    if path in _STREAMED:
        stream: dict[str, Any] = {"schema": {}}
        responses["200"].setdefault("content", {})["text/event-stream"] = stream
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    for status, text in (("4XX", "The request is refused."), ("5XX", "It could not be answered.")):
        responses[status] = {"description": text, "content": {"application/json": reference}}
