"""The HTTP side of `runner.serve`: OpenAI's API and a chat page, over `lmlib.serve`.

Only this folder imports `starlette` and `uvicorn`, from the extra `serve`.
"""
