"""Rows as conversations, told by their columns as ms-swift tells them."""

SYSTEM = "You answer for the support desk."
QUERIES = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSES = ("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def convert(row):
    """A row of messages, of an instruction and its input, or of a query and its response."""
    messages = first(row, "messages", "conversation", "conversations")
    if messages is None:
        query = first(row, *QUERIES)
        if "instruction" in row and "input" in row:
            given = (row["input"] or "").removeprefix("输入：")
            query = "\n".join(part for part in (row["instruction"], given) if part)
        response = first(row, *RESPONSES, "text", "completion", "content")
        turns = [*(row.get("history") or []), (query, response)]
        roles = ("user", "assistant")
        messages = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(roles, turn, strict=False)
            if text is not None
        ]
    messages = [plain(message) for message in messages]
    system = first(row, "system", "system_prompt") or SYSTEM
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def first(row, *names):
    """The first of some columns that has a value."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def plain(message):
    """A message by the names that templates know."""
    role = first(message, "role", "from")
    return {"role": ROLES.get(role, role), "content": first(message, "content", "value")}
