"""How far a run is: a bar on a terminal, plain lines elsewhere. Both on stderr."""

import logging
import sys
import time

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Progress from step `start` to `total`."""

    def __init__(self, start: int, total: int):
        self.total = total
        self.bar = None
        self.last_line = -SECONDS_BETWEEN_LINES
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=start, unit="step", file=sys.stderr)

    def update(self, step: int, figures: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == self.total or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            log.info("step %d/%d  %s", step, self.total, figures)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
