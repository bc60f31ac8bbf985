"""Why trainer and engine disagree: causes told apart from the top-K log-probs of both policies."""
