"""Who proposes the tokens that a verify checks: drafts, drafters without weights, the choice of a tree. No torch."""
