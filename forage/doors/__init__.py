"""A recipe where another program plays: its questions, tools and reward for other trainers."""
