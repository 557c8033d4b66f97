"""Where in vLLM an exception was raised."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType


def innermost(trace: TracebackType | None) -> tuple[str, str]:
    """The deepest frame inside vLLM: ``module:function`` and its source line. Falls back to the deepest frame."""
    frames = [(f, line) for f, line in traceback.walk_tb(trace)]
    inside = [item for item in frames if str(item[0].f_globals.get("__name__", "")).startswith("vllm.")]
    frame, line = (inside or frames)[-1]
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_name}", source
