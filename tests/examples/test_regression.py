"""The worked example of the documentation, in its reduced form."""


def test_the_mixture_wins_where_there_are_regions(example):
    reduced = ["--tables", "regions", "--folds", "2", "--rows", "400"]
    code, out, err = example("moe_regression", *reduced)
    assert code == 0, err
    head, row = out.splitlines()
    names = head.split()[1:]
    scores = dict(zip(names, (float(word) for word in row.split()[1::3]), strict=True))
    assert names == ["linear", "mixture", "forest", "boosting"]
    assert scores["mixture"] > max(scores["forest"], scores["boosting"]) + 0.1
