"""A custom tool: ``environment.tools: [search, examples.calculator:calculator]``."""

import re


class Calculator:
    name = "calculator"
    prompt_line = "For arithmetic, write <calculator> 2 * (3 + 4) </calculator>."

    def run(self, expression: str) -> str:
        """Works out one line of arithmetic, like 2 * (3 + 4)."""
        is_arithmetic = re.fullmatch(r"[\d\s.()+*/-]{1,100}", expression)
        try:
            if is_arithmetic and "**" not in expression:  # nothing else ever reaches eval
                return f"{eval(expression.strip()):.12g}"
        except (SyntaxError, TypeError, ArithmeticError):
            pass
        return "This cannot be worked out."  # the model's mistake, which it can learn from


calculator = Calculator()
