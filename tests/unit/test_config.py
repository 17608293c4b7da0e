"""config: vLLM's names and meanings, one clear error for anything else."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.config import SETTINGS, Environment, HeteroTPConfig, HostPort
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding


def test_defaults_are_those_of_vllms_own_connector() -> None:
    config = HeteroTPConfig.from_extra_config({})
    assert config.mooncake_protocol == "rdma"
    assert config.device_name == ""
    assert config.num_workers == 10
    assert config.bootstrap_server_address is None
    assert (config.transfer_mode, config.staging_mib, config.staging_slot_mib) == ("auto", 64, 16)
    assert config.environment == Environment(keep_s=480.0, connector_timeout_s=30.0, bootstrap_port=8998)


def test_none_and_null_values_mean_the_default() -> None:
    assert HeteroTPConfig.from_extra_config(None) == HeteroTPConfig.from_extra_config({"device_name": None})


def test_values_are_taken() -> None:
    config = HeteroTPConfig.from_extra_config(
        {
            "mooncake_protocol": "tcp",
            "device_name": "mlx5_0,mlx5_1",
            "num_workers": 4,
            "bootstrap_server_address": "10.0.0.1:9000",
            "lease_s": 20,
            "load_deadline_s": 60.5,
        }
    )
    assert config.mooncake_protocol == "tcp"
    assert config.device_name == "mlx5_0,mlx5_1"
    assert config.num_workers == 4
    assert config.bootstrap_server_address == HostPort("10.0.0.1", 9000)
    assert (config.lease_s, config.load_deadline_s) == (20.0, 60.5)
    assert isinstance(config.lease_s, float)


def test_an_unknown_setting_is_refused_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        HeteroTPConfig.from_extra_config({"num_worker": 4})
    message = str(caught.value)
    assert "'num_worker'" in message
    assert "Did you mean 'num_workers'?" in message
    for setting in SETTINGS:
        assert setting.name in message


@pytest.mark.parametrize(
    "key,value",
    [
        ("num_workers", "10"),
        ("num_workers", True),
        ("num_workers", 0),
        ("num_workers", 2.5),
        ("mooncake_protocol", 1),
        ("mooncake_protocol", "RDMA over IB"),
        ("device_name", ["mlx5_0"]),
        ("lease_s", 0),
        ("lease_s", float("nan")),
        ("lease_s", "30"),
        ("load_deadline_s", -1),
        ("transfer_mode", "fast"),
        ("transfer_mode", 1),
        ("staging_mib", -1),
        ("staging_slot_mib", 0),
    ],
)
def test_a_wrong_value_names_key_value_and_expectation(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        HeteroTPConfig.from_extra_config({key: value})
    message = str(caught.value)
    assert f"kv_connector_extra_config.{key}: expected " in message
    assert repr(value) in message
    assert "default" in message


@pytest.mark.parametrize(
    "text,expected",
    [
        ("host:1", HostPort("host", 1)),
        ("[fd00::1]:8998", HostPort("fd00::1", 8998)),
        ("http://p0.example:8998", HostPort("p0.example", 8998)),
    ],
)
def test_bootstrap_addresses(text: str, expected: HostPort) -> None:
    config = HeteroTPConfig.from_extra_config({"bootstrap_server_address": text})
    assert config.bootstrap_server_address == expected


@pytest.mark.parametrize("text", ["host", "host:", ":8998", "host:0", "host:65536", "fd00::1:8998", ""])
def test_bad_bootstrap_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="bootstrap_server_address: expected host:port"):
        HeteroTPConfig.from_extra_config({"bootstrap_server_address": text})


def test_an_address_prints_as_it_may_be_written() -> None:
    for text in ("host:1", "[fd00::1]:8998"):
        config = HeteroTPConfig.from_extra_config({"bootstrap_server_address": text})
        assert str(config.bootstrap_server_address) == text


def test_the_consumer_gives_up_before_the_producer_frees() -> None:
    """Precedent: vllm#35943, where the receive limit (540 s) exceeded the producer's expiry (480 s)."""
    config = HeteroTPConfig.from_extra_config({}, Environment(keep_s=80.0))
    assert config.load_deadline_s == 70.0
    with pytest.raises(ConfigError, match="less than the producer's keep time, 80 s"):
        HeteroTPConfig.from_extra_config({"load_deadline_s": 80}, Environment(keep_s=80.0))


@pytest.mark.parametrize(
    "environment,name",
    [
        (Environment(keep_s=0), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"),
        (Environment(connector_timeout_s=-1), "VLLM_MOONCAKE_CONNECTOR_TIMEOUT"),
        (Environment(bootstrap_port=0), "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
        (Environment(bootstrap_port=70000), "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
    ],
)
def test_absurd_environment_values_are_refused_by_name(environment: Environment, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        HeteroTPConfig.from_extra_config({}, environment)


@pytest.mark.parametrize(
    "extra,words",
    [
        ({"transfer_mode": "staged", "staging_mib": 0}, "'staged' needs staging memory"),
        ({"staging_mib": 4}, "expected at most staging_mib, 4, got 16"),
    ],
)
def test_staging_settings_that_contradict_each_other_are_refused(extra: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HeteroTPConfig.from_extra_config(extra)


def test_no_staging_memory_is_legal_where_nothing_needs_it() -> None:
    assert HeteroTPConfig.from_extra_config({"staging_mib": 0}).staging_mib == 0


def test_a_bound_is_written_out() -> None:
    with pytest.raises(ConfigError, match="an integer from 0 to 1048576, got -1"):
        HeteroTPConfig.from_extra_config({"staging_mib": -1})


def test_encodings_of_backends_are_declared_by_name() -> None:
    config = HeteroTPConfig.from_extra_config({"backend_encodings": {"OURS": "packed", "OURS_MLA": "latent"}})
    assert config.backend_encodings == {"OURS": Encoding.PACKED, "OURS_MLA": Encoding.LATENT}
    assert HeteroTPConfig.from_extra_config({}).backend_encodings == {}


@pytest.mark.parametrize(
    "value,words",
    [
        ("packed", "backend_encodings: expected a mapping, got 'packed'"),
        ({"OURS": "dense"}, r"backend_encodings.OURS: expected 'packed' or .*, got 'dense'"),
        ({"OURS": ["packed"]}, r"backend_encodings.OURS: expected 'packed' or .*, got \['packed'\]"),
        ({"": "packed"}, "expected an attention backend's name .*, got ''"),
        ({7: "packed"}, "expected an attention backend's name .*, got 7"),
        ({f"OURS{number}": "packed" for number in range(17)}, "expected at most 16 backends, got 17"),
    ],
)
def test_wrong_declarations_of_encodings_are_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HeteroTPConfig.from_extra_config({"backend_encodings": value})
