"""Descriptions of parameters and attributes that are clauses, such as ``size: in bytes``."""

from __future__ import annotations

import re

from tests.language.findings import Finding, Tally
from tests.language.prose import find_entries
from tests.language.sources import Nodes

ADVICE = "write a noun phrase with the type, shape or unit, for example 'Size of the object in bytes.'"

_PREPOSITIONS = (
    "after|along|among|as|at|before|besides?|between|beyond|by|during|for|from|in|into|of|on|over|per|through|to"
    "|under|until|with|within|without"
)
_PLURALS = "bytes|elements|keys|names|rows|samples|settings|steps|tensors|tokens|values"
"""Nouns before a relative clause: "bytes the rank sends" does not begin with a verb."""

_CLAUSE = re.compile(
    rf"(?:{_PREPOSITIONS}|that|which|whose|who|whom|what|where|why|how|it|they"
    r"|is|are|was|were|has|does|must|may|can|will"
    # A verb in the third person: "returns the batch", "wraps the model".
    r"|compares|computes|gets|gives|makes|receives|resolves|returns|takes|tries|turns|writes"
    rf"|(?!{_PLURALS})[a-z]+s(?= (?:an?|the|its|what)\b)"
    r"|called(?= (?:after|before|by|for|in|on|once|when|with)\b))"
    r"\b(?![-.`])",
    re.IGNORECASE,
)
_NOUN_PHRASE = re.compile(
    # A prepositional phrase before a noun phrase: "For conversations, the token that ends an answer".
    rf"(?:{_PREPOSITIONS})\b[^,.;:]{{1,60}}, (?:an?|the|its|their|whether|number|one|each|every)\b"
    r"|by default|for example|at (?:most|least)|as (?:many|much)"
    # Usual forms of indirect questions: "How many samples to load", "Where to save the model".
    r"|how (?:many|much|often|long|far)\b[^.;]* to \w+|(?:how|where|when) to \w+",
    re.IGNORECASE,
)


def is_clause(description: str) -> bool:
    """Return whether a description continues the name of the parameter like a sentence."""
    text = " ".join(description.split())
    return bool(_CLAUSE.match(text)) and not _NOUN_PHRASE.match(text)


def tally_descriptions(path: str, nodes: Nodes) -> Tally:
    """Find the descriptions in ``Args:`` and ``Attributes:`` sections that are clauses.

    The examined places are all descriptions.
    """
    tally = Tally()
    for string in nodes.strings:
        docstring = str(string.value)
        for entry in find_entries(docstring):
            tally.examined += 1
            if is_clause(docstring[entry.description : entry.end]):
                line, last_line = (
                    string.lineno + docstring.count("\n", 0, offset) for offset in (entry.start, entry.end)
                )
                text = " ".join(docstring[entry.start : entry.end].split())
                tally.findings.append(Finding(path, line, last_line, "clause", text, ADVICE))
    return tally
