"""How values of users and files are written in errors: in at most `MAX_SHOWN` characters."""

MAX_SHOWN = 200


def shown(value: object) -> str:
    """Returns the `repr` of a value, cut where it is long."""
    try:
        return cut(repr(value))
    except Exception as error:  # a class of the user's, or an int of thousands of digits
        return f"a value of type {type(value).__name__} ({cut(str(error))})"


def cut(text: object) -> str:
    """Returns a text, or that of an exception, cut where it is long."""
    text = str(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
