import socket

import pytest

from forage.retrieval.web.public_addresses import AddressGuard, RefusedAddressError

INSIDE = """
127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255
192.168.0.1 192.168.255.255 169.254.0.1 169.254.169.254 100.64.0.1 100.100.100.200 192.0.2.1
198.18.0.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
::1 :: fe80::1 fe80::1%eth0 febf::1 fc00::1 fdff::1 fd00:ec2::254 fec0::1 ff02::1 ::127.0.0.1
2001:db8::1 2001::1 100::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0.0.0.0 ::ffff:7f00:1
2002:7f00:1:: 2002:a00:1:: 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1
""".split()

OUTSIDE = """
1.1.1.1 8.8.8.8 93.184.216.34 172.15.255.255 172.32.0.1 192.167.255.255 169.253.255.255
11.0.0.1 126.255.255.255 128.0.0.1 100.63.255.255 100.128.0.1 223.255.255.255
2606:4700:4700::1111 2a00:1450:4001::1 ::ffff:1.1.1.1 2002:101:101:: 64:ff9b::101:101
""".split()


def info(host: str) -> tuple[int, int, int, str, tuple[str, int]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, 80)


@pytest.mark.parametrize("host", INSIDE)
def test_no_socket_is_made_for_an_address_inside(host: str):
    with pytest.raises(RefusedAddressError, match="is not a public address"):
        AddressGuard().open_socket(info(host))


@pytest.mark.parametrize("host", OUTSIDE)
def test_public_addresses_are_let_through(host: str):
    assert AddressGuard().allows(host)


def test_a_network_that_is_let_through_opens_no_other():
    guard = AddressGuard(allowed_networks=["127.0.0.0/8"])
    assert guard.allows("127.0.0.1")
    assert guard.allows("::ffff:127.0.0.1")
    assert not guard.allows("::1")
    assert not guard.allows("10.0.0.1")
    guard.open_socket(info("127.0.0.1")).close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("file:///etc/passwd", "scheme 'file'"),
        ("ftp://example.org/", "scheme 'ftp'"),
        ("gopher://example.org:80/", "scheme 'gopher'"),
        ("data:text/html,hello", "scheme 'data'"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("//example.org/", "scheme ''"),
        ("example.org", "scheme ''"),
        ("", "scheme ''"),
        ("http:///path", "without a host"),
        ("http://user@example.org/", "user name"),
        ("http://user:word@example.org/", "user name"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:6379/", "port 6379"),
        ("https://example.org:0/", "port 0"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://example.org:99999/", "[Pp]ort"),
        ("http://example.org/" + "a" * 5000, "5019 characters"),
    ],
)
def test_addresses_that_are_no_web_addresses_are_refused(url: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        AddressGuard().check_url(url)


@pytest.mark.parametrize(
    "url", ["http://example.org", "https://example.org/a?b#c", "http://example.org:8080/"]
)
def test_web_addresses_are_fine(url: str):
    assert AddressGuard().check_url(url).host == "example.org"


def test_other_ports_may_be_allowed():
    assert AddressGuard(allowed_ports=None).check_url("http://example.org:22/").port == 22
    with pytest.raises(ValueError, match="port 80"):
        AddressGuard(allowed_ports={81}).check_url("http://example.org/")
