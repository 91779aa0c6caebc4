"""A sentence model for IFEval's checkers on machines without nltk's.

Some of IFEval's instructions count sentences with nltk's English "punkt_tab" model, which nltk fetches from the
network. Where it is not installed we provide the same unsupervised splitter with a hand-written list of abbreviations,
and say so.
"""

import functools
import logging
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# Punkt stores abbreviations in lower case and without the last dot.
ABBREVIATIONS = """
a.d a.k.a a.m adm apr aug ave b.c blvd c.f ca capt cf co col corp cpl ct dec dept dr e.g ed est etc feb fig
fri ft gen gov hon i.e inc jan jr jul jun lt ltd m.d maj mar messrs mon mr mrs ms mt no nos nov oct op p p.m
p.s ph.d pl pp pres prof rd rep rev sat sen sep sept sgt sr st sun thu tue u.k u.n u.s u.s.a univ v viz vol vs
wed
""".split()


@functools.cache
def provide() -> tempfile.TemporaryDirectory | None:
    """Make sure that nltk finds an English model. Returns the folder of ours, which lives as long as the process."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
        return None
    except LookupError:
        pass
    root = tempfile.TemporaryDirectory(prefix="mars-jax-punkt-")
    folder = Path(root.name) / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("\n".join(ABBREVIATIONS))
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    nltk.data.path.append(root.name)
    logger.warning(
        "nltk's sentence model is not installed (python -m nltk.downloader punkt_tab): IFEval's sentence counts "
        "come from the same splitter with a short list of abbreviations and may differ on a few prompts"
    )
    return root
