from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import subscription


def test_it_hears_until_it_is_closed_whatever_others_do():
    mine, others = [], []
    first = subscription.Subscription(lambda _, value: mine.append(value))
    second = subscription.Subscription(lambda _, value: others.append(value))
    metrics.DATA_WAIT.record(1.0)
    metrics.DATA_ROWS.record(2)
    first.close()
    first.close()
    metrics.DATA_WAIT.record(3.0)
    metrics.DATA_ROWS.record(4)
    second.close()
    metrics.DATA_ROWS.record(5)
    assert mine == [1.0, 2]
    assert others == [1.0, 2, 3.0, 4]
