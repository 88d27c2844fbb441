"""One run: what it begins with, its steps, what it saves and what it leaves."""
