"""Serves many requests with one model at once; an answer does not depend on the others."""

from lmlib.serve.engine import Engine
from lmlib.serve.requests import MOST_STOP_IDS, MOST_TOP, Full, Load, Request, Token, Update
from lmlib.serve.service import Service

__all__ = [
    "MOST_STOP_IDS",
    "MOST_TOP",
    "Engine",
    "Full",
    "Load",
    "Request",
    "Service",
    "Token",
    "Update",
]
