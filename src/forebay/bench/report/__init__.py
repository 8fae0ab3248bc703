"""What a run came to, as one page in two languages: the verdict at the top, the evidence at the bottom."""
