"""Generated recipes whose sections go together: each of them is meant to run."""


def digits_or_diabetes(r):
    """Data and a model that fits them."""
    if r.random() < 0.5:
        data = {"name": "digits", "clients": r.randint(4, 12)}
        data["partition"] = r.choice(["iid", "shards", "dirichlet"])
        if data["partition"] == "dirichlet":
            data["alpha"] = r.choice([0.01, 0.5, 100.0])
        models = [{"name": "softmax"}, {"name": "mlp", "hidden": [r.randint(1, 6)]}]
    else:
        data = {"name": "diabetes", "clients": r.randint(4, 12)}
        data["partition"] = r.choice(["iid", "shards"])
        models = [{"name": "linear"}, {"name": "mlp", "hidden": [2, r.randint(1, 4)]}]
    if data["partition"] == "shards" and r.random() < 0.5:
        data["shards_per_client"] = r.randint(1, 3)
    data["most_records"] = r.randint(1, 12)
    if r.random() < 0.2:
        data["resample"] = r.randint(40, 400)
    if r.random() < 0.2:
        data["seed"] = r.choice([0, 7, 2**40])
    return data, r.choice(models)


def sampling(r, clients):
    size = r.randint(1, clients)
    return r.choice(
        [
            {"kind": "poisson", "rate": r.choice([1e-9, 0.3, 0.5, 1.0])},
            {"kind": "fixed", "size": size},
            {"kind": "round-robin", "size": size},
            {"kind": "all"},
        ]
    )


def local_sgd(r):
    local = {"kind": "sgd", r.choice(["epochs", "steps"]): r.randint(1, 3)}
    local["batch"] = r.choice([0, 1, 5, 10**6])
    if "steps" in local and r.random() < 0.3:
        return {**local, "mu": 0.5, "gamma": 8.0}
    local["lr"] = r.choice([1e-3, 0.1, 1e6])
    local["momentum"] = r.choice([0.0, 0.0, 0.9])
    local["weight_decay"] = r.choice([0.0, 0.0, 0.1])
    return local


def local_work(r):
    return {"kind": "gradient"} if r.random() < 0.4 else local_sgd(r)


def clipping(r, kinds=("fixed", "poly")):
    value = r.choice([1e-3, 1.0, 50.0])
    kind = r.choice(kinds)
    if kind == "fixed":
        return {"kind": kind, "value": value}
    if kind == "poly":
        return {"kind": kind, "value": value, "power": r.choice([0.0, 1.0, 2.5])}
    return {"kind": kind, "value": value, "bit_noise": 20.0, "quantile": 0.7}


def budget(r):
    return {"delta": r.choice([1e-3, 1e-5, 1e-9])}


def protection(r, sample, local):
    """What is added for one of the papers' kinds of protection, as sections."""
    source = r.choice(["seeded", "seeded", "secure"])
    noise = {"multiplier": r.choice([2.0, 8.0]), "source": source}
    kind = r.choice(["none", "clip", "weak", "server", "client", "laplace", "two-point", "steps"])
    match kind:
        case "none":
            return {"noise": {"kind": "none"}}
        case "clip":
            return {"clip": clipping(r)}
        case "weak":
            return {
                "clip": clipping(r),
                "noise": {"kind": "gaussian", "multiplier": 0.1, "claim": False},
            }
        case "server":
            clip = clipping(r, ("fixed", "poly", "quantile"))
            return {
                "clip": clip,
                "noise": {"kind": "gaussian", **noise},
                "budget": budget(r),
            }
        case "client":
            sections = {
                "clip": clipping(r),
                "noise": {"kind": "gaussian", "where": "client", **noise},
                "budget": budget(r),
            }
            if sample["kind"] == "fixed" and r.random() < 0.5:
                sections["sample"] = {**sample, "max_participations": 3}
            return sections
        case "laplace":
            return {
                "clip": {**clipping(r), "norm": "l1"},
                "noise": {"kind": "laplace", **noise},
                "budget": budget(r),
            }
        case "two-point":
            return {
                "sample": {"kind": "all"},
                "clip": {"kind": "range", "radius": 0.2, "adaptive": r.random() < 0.5},
                "noise": {"kind": "two-point", "epsilon": r.choice([0.1, 1.0])},
                "budget": budget(r),
            }
        case _:
            return {
                "client": {"kind": "dp-sgd", "rate": 0.5, "steps": r.randint(1, 2), "lr": 0.1},
                "clip": {"kind": "fixed", "value": 1.0},
                "noise": {"kind": "gaussian", "where": "training", "multiplier": 2.0},
                "budget": {"delta": 1e-5},
            }


def whole(r):
    """A recipe whose sections go together."""
    data, model = digits_or_diabetes(r)
    sample, local = sampling(r, data["clients"]), local_work(r)
    recipe = {
        "name": r.choice(["generated", "Größe", "a b", "x" * 60]),
        "seed": r.choice([0, 1, 2**31, 2**63 - 1]),
        "rounds": r.randint(1, 2),
        "data": data,
        "model": model,
        "sample": sample,
        "client": local,
        "engine": {"workers": 1, "mode": r.choice(["vectorised", "looped"])},
    }
    if r.random() < 0.3:
        recipe["evaluate"] = {"every": r.randint(1, 3), "diagnostics": r.random() < 0.5}
    if r.random() < 0.3:
        recipe["server"] = {"optimizer": "adam", "lr": 0.01}
    elif r.random() < 0.3:
        recipe["server"] = {"momentum": r.choice([0.0, 0.9]), "lr": r.choice([0.1, 1.0])}
    recipe |= protection(r, sample, local)
    if recipe.get("noise", {}).get("source") == "secure":
        recipe["engine"]["mode"] = "looped"
        if data["name"] == "diabetes":
            recipe["data"] = {**data, "statistics": "public"}
    if recipe["client"]["kind"] == "dp-sgd":
        recipe["data"] = {key: value for key, value in data.items() if key != "resample"}
    return recipe
