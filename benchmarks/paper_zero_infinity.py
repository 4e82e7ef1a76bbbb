"""What ZeRO-Infinity prints of its results, beside this library's figures: part of ``make paper-table``.

Table 4 and what the text of sections 7.2 to 7.6 says in figures that can be computed, by `fit/zero_infinity`.
"""

from collections.abc import Iterator, Sequence

from elixir_tools.fit import zero_infinity


def compared(table: str) -> Iterator[tuple[str, float, float]]:
    """(what, printed, ours) of each figure."""
    for row in zero_infinity.rows_of(table):
        for name, text in row["printed"].items():
            yield row.get("says", f"{row.get('model')} {name}"), float(text), row[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables; there are no arguments."""
    for table, title in (("table-4", "Table 4"), ("text", "text of 7.2 to 7.6")):
        print(f"ZeRO-Infinity, {title}")
        for what, printed, ours in compared(table):
            print(f"{printed:8g} {ours:8.4g} {ours / printed - 1:+7.1%}  {what}")
    print(
        "Figures 1, 5 and 6b to 6e are pictures; for Figure 6a see `elixir-moe plan --largest model` on a DGX-2 (docs)"
    )


if __name__ == "__main__":
    main()
