"""OpenAI-compatible servers as a benchmark needs them: started, ended for certain, asked within bounds, accounted."""
