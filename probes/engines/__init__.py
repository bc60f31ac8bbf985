"""Log-probs of the behavior policy, as serving engines report them."""
