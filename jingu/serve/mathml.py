"""Formulas of the chat page: LaTeX to MathML, as a tree from which the page builds elements."""

from __future__ import annotations

from html import unescape
from typing import Annotated, Any, Literal
from xml.etree.ElementTree import Element

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from jingu.serve import protocol
from jingu.serve.responses import JsonResponse

router = APIRouter(tags=["page"], route_class=protocol.StrictRoute)


class Formula(protocol.RequestBody):
    """A formula; `display` is where it stands: in a line of text, or in a block of its own."""

    latex: Annotated[str, Field(max_length=2_000)]
    display: Literal["inline", "block"] = "inline"


class FormulasRequest(protocol.RequestBody):
    """Formulas to convert."""

    formulas: Annotated[list[Formula], Field(max_length=64)]


@router.post("/math", include_in_schema=False)
async def convert_formulas(body: FormulasRequest) -> Response:
    """Convert formulas to MathML. Each is [name, attributes, children], or null if it cannot be converted."""
    return JsonResponse({"formulas": [convert(formula.latex, formula.display) for formula in body.formulas]})


def convert(latex: str, display: str) -> list[Any] | None:
    """Return a formula as a tree; None if the library is missing or cannot convert it."""
    try:
        from latex2mathml.converter import convert_to_element

        return _tree(convert_to_element(latex, display=display))
    except Exception:
        # Text of a model can be any LaTeX, and the library's errors have no common base class. The page shows the text.
        return None


def _tree(element: Element) -> list[Any]:
    """Return an element as [name, attributes, children]."""
    # The library writes characters as references.
    children: list[Any] = [unescape(element.text)] if element.text else []
    for child in element:
        children += [_tree(child), *([unescape(child.tail)] if child.tail else [])]
    return [element.tag, dict(element.attrib), children]
