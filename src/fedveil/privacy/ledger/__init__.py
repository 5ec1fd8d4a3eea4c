"""What was spent: the ledger, its file and hash chain, and who may look at it."""
