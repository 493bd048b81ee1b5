"""Marks of unidiomatic prose: words and phrases that readers stumble over, each with advice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.language.findings import Finding, Tally
from tests.language.prose import BREAK, Kind, Passage

_GAP = r"(?:[ \t]+|[ \t]*\n[ \t]*)"
"""Replaces the spaces in the regular expressions of marks."""

_CONTEXT = 80
"""Number of characters before and after the beginning of a phrase that an exempt phrase may contain."""

_SENTENCE_START = rf"(?:{BREAK}\s*|[.!?][\"')]?\s+)"
_QUESTION = rf"(?=[^.!{BREAK}]*\?)"
_PEOPLE = r"\b(?:you|we|they|users?|people|who|readers?|authors?|maintainers?|reviewers?)(?: \w+)?"
_CLAUSE_STARTS = (
    "it|they|there|that|this|these|those|the|no|none|nothing|an?|one|what|some|all|each|every|its|their|such"
    "|only|two|several|another|not|both|others?"
)
_PLACES = (
    "address|cases?|column|directory|file|folder|format|index|line|list|location|machine|mapping|offset|path"
    "|places?|points?|position|section|tuple"
)
_BEFORE_WHERE = rf"{_PLACES}|decides?|defines?|determines?|find|from|in|know|of|see|shows?|specif(?:y|ies)|to"


@dataclass(frozen=True)
class Mark:
    """A kind of phrase to avoid.

    Attributes:
        name: Name of the mark, which the baseline and ``--list`` use.
        advice: Instructions for the author, as an imperative clause.
        pattern: Regular expression of the phrase, in lower case unless it is case-sensitive. A space matches
            spaces with at most one line break. If there is a group, the findings show only the group.
        exempt: Regular expression of idiomatic phrases that contain the beginning of the phrase.
        kinds: Kinds of prose to search.
        case_sensitive: Whether capital letters matter.
    """

    name: str
    advice: str
    pattern: str
    exempt: str = ""
    kinds: frozenset[Kind] = frozenset(Kind)
    case_sensitive: bool = False

    @cached_property
    def _phrase(self) -> re.Pattern[str]:
        return re.compile(self.pattern.replace(" ", _GAP))

    @cached_property
    def _exempt_phrase(self) -> re.Pattern[str]:
        return re.compile(self.exempt.replace(" ", _GAP))

    def find(self, passage: Passage) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each phrase in ``passage.text``."""
        if passage.kind not in self.kinds:
            return
        prose = passage.prose if self.case_sensitive else passage.lower_prose
        for match in self._phrase.finditer(prose):
            if not self.exempt or not self._is_exempt(prose, match.start()):
                yield match.span(match.lastgroup or 0)

    def _is_exempt(self, prose: str, start: int) -> bool:
        """Return whether an exempt phrase contains the phrase that begins at `start`."""
        phrases = self._exempt_phrase.finditer(prose, max(0, start - _CONTEXT), start + _CONTEXT)
        return any(phrase.start() <= start < phrase.end() for phrase in phrases)


MARKS = (
    Mark(
        "opener",
        "begin with a verb (a function) or with the head noun (anything else)",
        r"\A\s*(?P<opener>What|Those|That|How|Which|Where|From|Of|Within)\b",
        kinds=frozenset({Kind.DOCSTRING}),
        case_sensitive=True,
    ),
    Mark(
        "page-opener",
        "begin the sentence with its subject or with a verb",
        rf"{_SENTENCE_START}(?P<opener>What|Those|That|How|Which|From|Of|Within)\b(?!{_QUESTION})",
        exempt=rf"{_SENTENCE_START}(?:How to|That is|From \S+ to|Of course)\b",
        kinds=frozenset({Kind.PAGE}),
        case_sensitive=True,
    ),
    Mark(
        "inner-opener",
        "begin the sentence with its subject or with a verb",
        rf"{_SENTENCE_START}(?P<opener>What|Which|Of)\b(?!{_QUESTION})",
        exempt=rf"{_SENTENCE_START}Of course\b",
        kinds=frozenset({Kind.DOCSTRING, Kind.COMMENT}),
        case_sensitive=True,
    ),
    Mark(
        "what-clause",
        "name the thing, for example 'the files that ...'",
        r"\bwhat\b(?! (?:to|if|happens|follows)\b)",
        exempt=rf"{_PEOPLE} what\b|\b(?:is|are) what\b|\bwhat\b{_QUESTION}",
        case_sensitive=True,
    ),
    Mark(
        "those-of",
        "repeat the noun instead of 'that' or 'those'",
        r"\bthose (?:of|in|that|which|for|from|with|without|on|at|who|whose|to|by)\b|\bthat of\b",
        exempt=r"\b(?:so|such|note) that of\b",
    ),
    Mark(
        "one-that",
        "repeat the noun instead of 'one'",
        r"\bones? (?:that|which|who|whose)\b",
        exempt=r"\bonly ones? (?:that|which|who|whose)\b",
    ),
    Mark(
        "of-which",
        "begin a new sentence",
        r"\bof which\b",
        exempt=r"\b(?:each|all|both|most|some|any|either|neither|none|one) of which\b",
    ),
    Mark("theirs", "name the owner, for example 'the library's file'", r"\b(?:ours|theirs)\b"),
    Mark(
        "own",
        "write 'custom', 'user-defined', 'separate' or the owner's name",
        r"\bof (?:the|an?|one|your|its|their|his|our|each)(?:'s)?(?: \w+['’]s?)? own\b",
    ),
    Mark(
        "users",
        "write 'custom' or 'user-defined', or repeat the noun",
        r"\bof (?:the|a) users?['’]s?"
        r"(?=[.,;:)]|\Z| (?:is|are|has|may|can|that|which|and|or|in|on|for|with|to|by|as)\b)",
    ),
    Mark(
        "is-no",
        "write 'is not a' or 'has no'",
        r"\b(?:is|are|was|were|be|been|being) no (?!(?:longer|more|less|fewer|one|\w+er than)\b)[a-z]\w*",
        exempt=r"\bthere(?: \w+)? (?:is|are|was|were|be|been|being) no\b",
    ),
    Mark(
        "alone",
        "write 'only' before the noun",
        r"\b[\w']+ alone\b",
        exempt=r"\b(?:let|leaves?|left|stands?) (?:\w+ )?alone\b"
        r"|\b[\w']+ alone (?:can|cannot|(?:do|does|is|are|may) not)\b",
    ),
    Mark(
        "where",
        "write 'if' or 'when'",
        rf"\bwhere (?:{_CLAUSE_STARTS})\b",
        exempt=rf"\b(?:{_BEFORE_WHERE}),? where\b",
    ),
    Mark("whole", "write 'complete', 'full', 'entire' or 'all'", r"\bwhole\b(?! numbers?\b)"),
    Mark(
        "say",
        "write 'define', 'record', 'report' or 'print': code does not say",
        r"\b(?:says?|said|saying)\b",
        exempt=rf"{_PEOPLE} (?:say|said|saying)\b|\bsay,|\bthat said\b|\bthat being said\b",
    ),
    Mark(
        "tell",
        "write 'print', 'report', 'pass' or 'distinguish': code does not tell",
        r"\b(?:tells?|told|telling)\b",
        exempt=rf"{_PEOPLE} (?:tell|told|telling)\b|\btell (?:you|us|me)\b",
    ),
    Mark(
        "know",
        "write 'supports', 'contains', 'defines' or 'has': code does not know",
        r"\bknows\b|\bdo(?:es)? not know\b|\bcannot know\b",
        exempt=rf"{_PEOPLE} (?:knows|do not know|does not know|cannot know)\b",
    ),
    Mark(
        "ask",
        "write 'requests', 'requires', 'queries' or 'calls': code does not ask",
        r"\b(?:asks|asked)\b",
        exempt=rf"{_PEOPLE} asked\b|\bfrequently asked\b",
    ),
    Mark(
        "want",
        "write 'needs', 'expects', 'requires' or 'requested': code does not want",
        r"\b(?:wants|wanted)\b",
        exempt=rf"{_PEOPLE} (?:wants|wanted)\b",
    ),
    Mark(
        "learn",
        "write 'receives' or 'detects': code does not learn",
        r"\blearns? (?:of|about)\b|\blearns (?:that|what|which|whether)\b",
    ),
    Mark("look", "write 'inspect', 'read', 'check' or 'examine'", r"\blook(?:s|ed) (?:at|after|into)\b"),
    Mark(
        "come-to",
        "write 'is', 'equals' or 'evaluates to'",
        r"\b(?:comes?|came|coming) to\b",
        exempt=r"\bcomes? to an end\b|\bwhen it comes to\b",
    ),
    Mark("go-on", "write 'continue'", r"\b(?:goes|went|go) on\b"),
    Mark(
        "lie",
        "write 'is', 'is stored' or 'is located'",
        r"\b(?:lies|lie|lain)\b",
        exempt=r"\blies? (?:in \[|in the range|in the interval|between \S*\d)",
    ),
    Mark(
        "stand",
        "write 'is', 'means' or 'represents'",
        r"\b(?:stands?|stood)\b(?!-)",
        exempt=r"\bto stand out\b",
    ),
    Mark("beside", "write 'next to', 'in addition to', 'except' or 'with'", r"\bbesides?\b"),
    Mark("alike", "write 'the same way' or 'both'", r"\balike\b"),
    Mark("meanwhile", "name the period, for example 'during the save'", r"\bmeanwhile\b"),
    Mark("whatever", "write 'any', 'regardless of' or name the thing", r"\b(?:whatever|whoever)\b"),
    Mark("as-far-as", "write 'if', 'up to' or 'to the extent that'", r"\b(?:as|so) far as\b|\binsofar\b"),
    Mark("as-long-as", "write 'while' or 'if'", r"\b(?:as|so) long as\b"),
    Mark(
        "so-many",
        "write the number or 'this many'",
        r"\bso many\b|\bas many\b",
        exempt=r"\bas many (?:\w+ ){0,2}as\b",
    ),
    Mark(
        "in-its-place",
        "write 'instead' or 'instead of'",
        r"\bin (?:its|their|whose) places?\b|\bin place of\b"
        r"|\b(?:take|takes|took|taken) (?:its|their|whose|the) places?\b",
    ),
    Mark(
        "somebody", "name the process, the caller or the user", r"\b(?:somebody|nobody|everybody|anybody)\b"
    ),
    Mark("anew", "write 'again' or 'from scratch'", r"\banew\b"),
    Mark(
        "elided-per",
        "write 'one ... per ...'",
        r"\b(?:an?|one) (?!(?:and|as|at|by|for|from|has|in|is|like|of|on|one|or|than|to|with)\b)[a-z]+"
        r" an? [a-z]+(?=[.,;)])"
        r"|\ban? [a-z]+ each(?=[.,;)])",
    ),
    Mark(
        "for-messages", "write 'used in error messages'", r"\bfor (?:(?:error|the) )?messages?(?=[.,;)]|\Z)"
    ),
    Mark(
        "british",
        "use American spelling, for example 'initialize', 'color', 'center', 'labeled'",
        r"\b(?:author|categor|custom|emphas|final|general|initial|material|maxim|memor|minim|normal|optim|organ"
        r"|parallel|priorit|quant|random|real|recogn|regular|serial|special|summar|synchron|token|util|vector"
        r"|visual)is(?:e|es|ed|er|ers|ing|ation|ations|able)\b"
        r"|\b(?:behaviour|colour|favour|flavour|honour|labour|neighbour|rumour)\w*"
        r"|\b(?:amongst|analys(?:e|ed|es|ing)|artefacts?|catalogues?|centred?|defence|fibres?|grey|judgement"
        r"|labell(?:ed|ing)|learnt|licences?|metres?|misspelt|modell(?:ed|ing)|practis(?:e|ed|ing)|programmes?"
        r"|signall(?:ed|ing)|spelt|travell(?:ed|ing)|whilst)\b",
        exempt=r"\banalyses (?:of|are|and)\b",
    ),
    Mark(
        "spelling",
        "write 'dataset', 'warmup', 'fine-tune' or 'micro-batch'",
        r"\bdata sets?\b|\bwarm-ups?\b|\bfine ?tun(?:e|es|ed|ing)\b|\bmicro batch(?:es)?\b",
    ),
)


def tally_marks(path: str, passages: Iterable[Passage]) -> Tally:
    """Find the marks in the prose of a file. The examined places are its words."""
    tally = Tally()
    for passage in passages:
        tally.examined += passage.count_words()
        for mark in MARKS:
            for start, end in mark.find(passage):
                line, last_line = passage.locate(start, end)
                text = passage.quote(start, end)
                tally.findings.append(Finding(path, line, last_line, mark.name, text, mark.advice))
    return tally
