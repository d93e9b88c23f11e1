"""All tabs, in their order.  Their modules are imported when a tab is first shown: DuckDB and numpy take 0.3 s."""

from collections.abc import Sequence

from asyncrl.page.tabs.tab import Tab, Views


def _overview() -> Views:
    from asyncrl.page.tabs import overview

    return overview.VIEWS


def _timeline() -> Views:
    from asyncrl.page.tabs import timeline

    return timeline.VIEWS


def _staleness() -> Views:
    from asyncrl.page.tabs import staleness

    return staleness.VIEWS


def _samples() -> Views:
    from asyncrl.page.tabs import samples

    return samples.VIEWS


def _advice() -> Views:
    from asyncrl.page.tabs import advice

    return advice.VIEWS


def _configuration() -> Views:
    from asyncrl.page.tabs import configuration

    return configuration.VIEWS


TABS: Sequence[Tab] = (
    Tab(key="overview", title="Overview", views=_overview),
    Tab(key="timeline", title="Timeline", views=_timeline),
    Tab(key="staleness", title="Staleness", views=_staleness),
    Tab(key="samples", title="Samples", views=_samples),
    Tab(key="advice", title="Advice", views=_advice),
    Tab(key="configuration", title="Configuration", views=_configuration),
)
