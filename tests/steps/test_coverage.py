from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.steps import coverage, holdings
from tests.tiers import saved_worlds


def brute_force(table, domain):
    """By each domain of a kind, the items of which all holders are in it."""
    names = {
        offer.host.domains.get(domain, "")
        for offer in table.offers
        if offer.tier == "local"
    }
    return {
        name: [
            item
            for item in range(table.num_items)
            if all(
                offer.tier == "local" and offer.host.domains.get(domain, "") == name
                for offer in table.holders(item)
            )
        ]
        for name in names
    }


@given(saved_worlds.saved(), st.sampled_from(["slice", "rack"]), st.data())
def test_what_is_lost_with_a_domain_is_what_no_other_holder_has(offers, domain, data):
    # Some hosts' manifests lie in storage, which outlasts them.
    in_storage = data.draw(st.sets(st.integers(0, len(offers) - 1)))
    offers = [
        holdings.Offer(
            tier="persistent" if number in in_storage else "local",
            manifest=each.manifest,
        )
        for number, each in enumerate(offers)
    ]
    table = holdings.Holdings.from_offers(offers)
    covered = coverage.coverage(table, domain)
    expected = brute_force(table, domain)
    assert {name: list(items) for name, items in covered.lost.items()} == expected
    assert list(covered.lost) == sorted(expected)
    assert covered.num_survivors == table.num_items - sum(map(len, expected.values()))
