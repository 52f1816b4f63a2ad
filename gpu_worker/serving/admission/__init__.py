"""May a sequence begin here, and beside which others?"""
