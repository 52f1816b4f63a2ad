"""Secrets as pods get them: certificates signed as cert-manager's objects ask, folders as kubelet mounts them."""

import datetime
import ipaddress
import os

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)
USES = {
    "server auth": x509.oid.ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH,
}


def name_of(text):
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def builder(subject, issuer, key):
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name_of(subject)).issuer_name(name_of(issuer))
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return made.not_valid_before(now - DAY).not_valid_after(now + DAY)


class Authority:
    """Signs what a Certificate object asks for, and nothing else."""

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = builder("authority", "authority", self._key)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._cert = made.sign(self._key, hashes.SHA256())

    def secret_for(self, spec):
        """The content of the Secret that a Certificate names, by the object's spec."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(uri) for uri in spec.get("uris", ())]
        names += [x509.DNSName(name) for name in spec.get("dnsNames", ())]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in spec.get("ipAddresses", ())]
        made = builder(spec["commonName"], "authority", key)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        uses = x509.ExtendedKeyUsage([USES[use] for use in spec["usages"] if use in USES])
        cert = made.add_extension(uses, critical=False).sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return {"tls.crt": cert.public_bytes(pem), "tls.key": private, "ca.crt": self._cert.public_bytes(pem)}


class MountedSecret:
    """A folder of files that are links into a link, `..data`, which is replaced in one step when the Secret changes."""

    def __init__(self, folder, content):
        self.folder = folder
        self._number = 0
        folder.mkdir(parents=True)
        self.replace(content)
        for name in content:
            (folder / name).symlink_to(f"..data/{name}")

    def replace(self, content):
        self._number += 1
        version = self.folder / f"..version-{self._number}"
        version.mkdir()
        for name, data in content.items():
            (version / name).write_bytes(data)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self.folder / "..data")
