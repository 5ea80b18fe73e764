"""docs/schema.md says what the tables hold: every column, in order, with its type."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from calibration.profile import write_samples
from experiments.candidates import COLUMNS
from sim.latency import LatencySample
from sim.policy import SpeculativeSpeculative
from sim.simulate import simulate
from sim.trace import Lane, Operation
from tests.sim.toy import markov, record_of, system_of, workload_of

PAGE = (Path(__file__).parents[1] / "docs" / "schema.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| ([\w<>]+) \| \S.* \|$", re.MULTILINE)
TABLES = ("sequences", "rounds", "spans", "latency", "agreement")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables")
    record = record_of(*markov(1), num_prompts=2, length=8, seed=1)
    simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record), system_of(record)).write(path)
    record.write(path / "agreement.parquet")
    write_samples([LatencySample(Lane.TARGET, Operation.VERIFY, 1, 8, False, 0, 0.01)], path / "latency.parquet")
    return path


def columns_of(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, re.sub(r"(element|item): ", "", str(field.type))) for field in schema]


@pytest.mark.parametrize("table", TABLES)
def test_every_column_stands_on_the_page(table: str, folder: Path) -> None:
    section = PAGE.split(f"### {table}\n")[1].split("\n#")[0]
    assert ROW.findall(section) == columns_of(pq.read_schema(folder / f"{table}.parquet"))


@pytest.mark.parametrize("table", ["rounds", "spans"])
def test_csv_holds_what_parquet_holds(table: str, folder: Path) -> None:
    rows = pq.read_table(folder / f"{table}.parquet")
    assert pyarrow.csv.read_csv(folder / f"{table}.csv").cast(rows.schema).equals(rows)


def test_columns_of_candidates_stand_on_the_page() -> None:
    section = PAGE.split("### candidates\n")[1].split("\n#")[0]
    assert ROW.findall(section) == list(COLUMNS.items())
