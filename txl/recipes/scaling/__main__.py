"""`python -m txl.recipes.scaling`: the tables of docs/scaling.md, as the code has them now."""

from txl.recipes.scaling.tables import tables

for name, table in tables().items():
    print(f"{name}\n\n{table}\n")
