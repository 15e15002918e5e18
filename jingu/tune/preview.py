"""`jingu tune preview`: which tokens of which rows will be trained, before anything is."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby, islice
from pathlib import Path

from jingu.config.schema import RunConfig
from jingu.data.supervised import WHOLE
from jingu.data.workers import spread
from jingu.data.writing import Encode
from jingu.runtime.files import cannot_write, replace_text
from jingu.text.readers import Tally
from jingu.text.tokenizer import Tokenizer
from jingu.tune.prepare import Maker, Unit, encoder, makers, told, units_of
from jingu.tune.rows import rows_before
from jingu.tune.supervise import Supervised

MOST_BAD = 5
"""Bad rows that are told; the others are counted."""
Marked = Callable[[list[str], int], str]
"""What is shown of neighbouring tokens that have the same weight."""

_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Trained tokens</title>
<style>:root{{color-scheme:light dark}}
body{{font:15px/1.7 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
h2{{font-size:1em;margin:2em 0 .5em}}pre{{font:inherit;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}}
i{{font-style:normal;outline:1px solid #8885;border-radius:2px}}b{{font-weight:normal}}
b i{{background:light-dark(#a6e3a6,#1d5c2c)}}b.other i{{background:light-dark(#eee08a,#5c5214)}}
s{{text-decoration:none;opacity:.4}}</style>
<p>A frame is a token, or several of one character; <b><i>green</i></b> ones are trained,
<b class="other"><i>yellow</i></b> ones with another weight than 1.</p>{body}
"""


def preview(config: RunConfig, rows: int = 3, to: Path | None = None) -> None:
    """Print the first rows of each corpus, token by token, and what becomes of all of them.

    Args:
        rows: so many are shown.
        to: an HTML file for them; None: the terminal.

    Raises:
        JinguError: the settings or the files do not allow rows to be made; a bad row alone does not stop this.
    """
    coloured = sys.stdout.isatty()
    page = []
    config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": "skip"})})
    for maker in makers(config):
        spans = (span for unit in units_of(maker.data) for span in unit)
        found = ((span, number, row) for span in spans for number, row in maker.rows(span, Tally()))
        for span, number, row in islice(found, rows):
            trained = int((row.weights[1:] > 0).sum())
            place = f"{Path(span.file.path).name}, row {rows_before(span) + number} ({row.kind})"
            title = f"{place}: {trained} of {len(row.ids)} tokens trained"
            page.append(f"<h2>{html.escape(title)}</h2><pre>{_row(row, maker.tokenizer, _in_page)}</pre>")
            if to is None:
                print(f"{title}\n{_row(row, maker.tokenizer, _coloured if coloured else _bracketed)}\n")
        totals = [f"{maker.data.path}:", *(f"  {line}" for line in _totals(config, maker))]
        print("\n".join(totals))
        page.append(f"<h2>{html.escape(totals[0])}</h2><pre>{html.escape(chr(10).join(totals[1:]))}</pre>")
    if to is not None:
        try:
            replace_text(to, _PAGE.format(body="\n".join(page)))
        except OSError as error:
            raise cannot_write(error, to) from error
        print(f"Wrote {to}.")


def _totals(config: RunConfig, maker: Maker) -> list[str]:
    """What becomes of all rows of a corpus, and the first bad ones."""
    tally, seen = Tally(), set[int]()
    encode, units, workers = encoder(config, maker)
    for of_unit, hashes in spread(partial(_counted, encode), units, workers):
        tally.add(of_unit)
        tally.copies += len(hashes) - len(set(hashes) - seen)
        seen.update(hashes)
    lines = told(tally, drops=maker.data.duplicates == "drop")
    more = len(tally.skipped) - MOST_BAD
    lines += [f"  bad: {line}" for line in tally.skipped[:MOST_BAD]]
    return lines + ([f"  and {more:,} more; data.on_error=skip lists all when they are prepared"] if more > 0 else [])


def _counted(encode: Encode, unit: Unit) -> tuple[Tally, list[int]]:
    """What becomes of the rows of a unit, and the hashes of those that are made."""
    tally = Tally()
    return tally, [hash_ for part in encode(unit, tally) for hash_ in part.hashes.tolist()]


def _row(row: Supervised, tokenizer: Tokenizer, marked: Marked) -> str:
    """A row as text, its trained tokens marked. The first token is never predicted."""
    tokens = zip(_texts(row, tokenizer), [0, *row.weights[1:].tolist()], strict=True)
    return "".join(
        marked([text for text, _ in together if text], weight)
        for weight, together in groupby(tokens, key=lambda each: each[1])
    )


def _texts(row: Supervised, tokenizer: Tokenizer) -> list[str]:
    """The text of each token; of several that make up one character, the last has it."""
    texts, waiting = [], []
    for id_ in row.ids:
        waiting.append(id_)
        text = tokenizer.decode(waiting, special=True)
        whole = not text.endswith("\ufffd")
        texts.append(text if whole else "")
        waiting = [] if whole else waiting
    return texts


def _coloured(texts: list[str], weight: int) -> str:
    return f"\x1b[{'2' if not weight else '30;42' if weight == WHOLE else '30;43'}m{'│'.join(texts)}\x1b[0m"


def _bracketed(texts: list[str], weight: int) -> str:
    share = "" if weight == WHOLE else f"{weight / WHOLE:.2g}:"
    return f"⟦{share}{'│'.join(texts)}⟧" if weight else "│".join(texts)


def _in_page(texts: list[str], weight: int) -> str:
    shown = "".join(f"<i>{html.escape(text)}</i>" for text in texts).replace("\n", "<s>↵</s>\n")
    if not weight:
        return shown
    return f"<b>{shown}</b>" if weight == WHOLE else f'<b class="other" title="{weight / WHOLE:.2g}">{shown}</b>'
