"""A mixture of experts on the tables that scikit-learn ships, against the usual regressors.

python examples/moe_regression.py [--folds 5] [--repeats 2] [--tables diabetes ...] [--rows N]

    diabetes    progression after a year from 10 measurements (442 rows)
    tumour      mean radius of a tumour from 20 features that are not sizes (569 rows)
    digit       how far right the ink of a digit lies, from the upper half of its image (1797 rows)
    regions     made up: a linear model in each of 4 regions, which is what a mixture is for

Every model sees the same folds; the table shows R² on rows that were not fitted, mean and standard
error over folds. The mixture chooses its number of experts inside each fold.
"""

import argparse
import warnings
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import RepeatedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tieline.lab.estimation import MoERegressor

Table = tuple[np.ndarray, np.ndarray]


def diabetes() -> Table:
    """The classic of this size."""
    x, y = load_diabetes(return_X_y=True)
    return np.asarray(x), np.asarray(y)


def tumour() -> Table:
    """The mean radius without the columns that are a size, which would give it away."""
    data: Any = load_breast_cancer()
    names = np.array([str(name) for name in data.feature_names])
    sizes = [any(word in name for word in ("radius", "perimeter", "area")) for name in names]
    return data.data[:, ~np.array(sizes)], data.data[:, list(names).index("mean radius")]


def digit() -> Table:
    """Where the ink of the lower half lies, from the pixels of the upper half."""
    data: Any = load_digits()
    images = data.images
    lower = images[:, 4:].sum(axis=1)
    upper = images[:, :4].reshape(len(images), -1)
    return upper[:, upper.std(axis=0) > 0], lower @ np.arange(8) / lower.sum(axis=1).clip(min=1)


def regions() -> Table:
    """Four regions of five dimensions, a linear model in each, and noise."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1500, 5))
    region = (x @ random.normal(size=(5, 4))).argmax(axis=1)
    y = (x * random.normal(size=(4, 5))[region]).sum(axis=1) + 3 * random.normal(size=4)[region]
    return x, y + 0.5 * random.normal(size=1500)


TABLES = {"diabetes": diabetes, "tumour": tumour, "digit": digit, "regions": regions}
MODELS = {
    "linear": lambda: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 4, 30))),
    "mixture": lambda: MoERegressor(
        "auto", max_experts=4, cv=3, n_init=2, max_iter=50, ridge=1e-3, random_state=0
    ),
    "forest": lambda: RandomForestRegressor(200, random_state=0),
    "boosting": lambda: GradientBoostingRegressor(random_state=0),
}


def main() -> None:
    """Print one row per table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, default=None, help="at most, of each table")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # the score on other rows is what counts
    warnings.filterwarnings("ignore", message=".*distinct targets for")
    print(f"{'R²':10s}" + "".join(f"{name:>18s}" for name in MODELS))
    for name in options.tables:
        x, y = (part[: options.rows] for part in TABLES[name]())
        folds = RepeatedKFold(n_splits=options.folds, n_repeats=options.repeats, random_state=0)
        scores = [cross_val_score(make(), x, y, cv=folds) for make in MODELS.values()]
        cells = [f"{s.mean():.3f} ± {s.std(ddof=1) / len(s) ** 0.5:.3f}" for s in scores]
        print(f"{name:10s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
