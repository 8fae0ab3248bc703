"""Evidence in one file: a zip archive whose every byte follows from its content, with a manifest and signatures."""

from forebay.bench.bundle.archive import BundleUnsound
from forebay.bench.bundle.bundle import Manifest, Verification, read_member, sign_bundle, verify_bundle, write_bundle
from forebay.bench.bundle.keys import generate_key, read_private_key, read_public_key

__all__ = [
    "BundleUnsound",
    "Manifest",
    "Verification",
    "generate_key",
    "read_member",
    "read_private_key",
    "read_public_key",
    "sign_bundle",
    "verify_bundle",
    "write_bundle",
]
