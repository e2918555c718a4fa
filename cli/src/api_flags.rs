//! Where `sublet arbiter` serves the control API to other hosts: flags, and the quota file where
//! they say nothing.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::bail;
use arbiter::ApiListener;
use clap::Args;

use crate::config::ApiRule;

/// Flags of `sublet arbiter`.
#[derive(Debug, Clone, PartialEq, Eq, Args, Default)]
pub struct ApiFlags {
    /// Serve the control API to other hosts at this address, with TLS and tokens
    #[arg(long = "api-listen", value_name = "ADDRESS:PORT", conflicts_with_all = ["embedded", "stop"])]
    pub listen: Option<SocketAddr>,
    /// Certificate for that, with its chain, in PEM
    #[arg(long = "api-cert", value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// Its key in PEM; its owner's alone (chmod 600)
    #[arg(long = "api-key", value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Who may ask there: a TOML file of tokens; its owner's alone (chmod 600)
    #[arg(long = "api-tokens", value_name = "FILE")]
    pub tokens: Option<PathBuf>,
}

impl ApiFlags {
    /// These, with the file's where these say nothing.
    #[must_use]
    pub fn or(self, file: &ApiRule) -> Self {
        let or = |flag: Option<PathBuf>, file: &Option<PathBuf>| flag.or_else(|| file.clone());
        Self {
            listen: self.listen.or(file.listen),
            cert: or(self.cert, &file.cert_file),
            key: or(self.key, &file.key_file),
            tokens: or(self.tokens, &file.tokens_file),
        }
    }

    /// Where to listen; `None`: for this host alone.
    ///
    /// # Errors
    /// Something is missing: without TLS or tokens nobody is served.
    pub fn listener(self) -> anyhow::Result<Option<ApiListener>> {
        let said = [
            ("--api-cert", "`cert_file`", self.cert.is_some()),
            ("--api-key", "`key_file`", self.key.is_some()),
            ("--api-tokens", "`tokens_file`", self.tokens.is_some()),
        ];
        let Some(address) = self.listen else {
            if let Some((flag, ..)) = said.iter().find(|(.., said)| *said) {
                bail!(
                    "{flag} is no use without an address: give --api-listen ADDRESS:PORT, or `listen` in [api] of the quota file"
                );
            }
            return Ok(None);
        };
        let missing = said.iter().filter(|(.., said)| !said);
        let missing: Vec<String> = missing
            .map(|(flag, key, _)| format!("{flag} ({key})"))
            .collect();
        match (self.cert, self.key, self.tokens) {
            (Some(certificate), Some(key), Some(tokens)) => Ok(Some(ApiListener {
                address,
                certificate,
                key,
                tokens,
            })),
            _ => bail!(
                "the API is served at {address} with TLS and tokens or not at all: give {} too, or the keys of that name in [api] of the quota file",
                missing.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> ApiFlags {
        let path = |name: &str| Some(PathBuf::from(name));
        ApiFlags {
            listen: Some(([127, 0, 0, 1], 7443).into()),
            cert: path("/cert"),
            key: path("/key"),
            tokens: path("/tokens"),
        }
    }

    #[test]
    fn it_takes_all_of_them_or_none() {
        assert_eq!(ApiFlags::default().listener().unwrap(), None);
        let whole = all().listener().unwrap().expect("somewhere");
        assert_eq!(whole.tokens, PathBuf::from("/tokens"));
        type Spoil = fn(&mut ApiFlags);
        let spoils: [(Spoil, &str); 4] = [
            (
                |flags| flags.cert = None,
                "give --api-cert (`cert_file`) too",
            ),
            (|flags| flags.key = None, "give --api-key (`key_file`) too"),
            (
                |flags| flags.tokens = None,
                "give --api-tokens (`tokens_file`) too",
            ),
            (
                |flags| flags.listen = None,
                "--api-cert is no use without an address",
            ),
        ];
        for (spoil, words) in spoils {
            let mut flags = all();
            spoil(&mut flags);
            let error = flags.listener().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = ApiRule {
            listen: Some(([10, 0, 0, 7], 1).into()),
            key_file: Some("/file".into()),
            tokens_file: Some("/file".into()),
            ..ApiRule::default()
        };
        let flags = ApiFlags {
            tokens: None,
            ..all()
        };
        let both = flags.or(&file).listener().unwrap().expect("somewhere");
        assert_eq!(both.address.port(), 7443);
        assert_eq!(both.key, PathBuf::from("/key"));
        assert_eq!(both.tokens, PathBuf::from("/file"));
    }
}
