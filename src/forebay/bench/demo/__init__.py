"""The demo: recompute against restore, with a real model, with evidence and a report.

`options` what can be asked for; `texts`, `prompts` what is read and asked; `setting` model, pool and runner; `run` the
phases; `audit` whether each way was what it is called; `results` the record; `report`, `page` how it is shown.
"""
