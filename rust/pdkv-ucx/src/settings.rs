//! What UCX is told about itself: the caller's wishes, our defaults, and what the environment already says.
//!
//! Everything goes in through `ucp_config_modify`; the environment is read, never written. The environment
//! wins over our defaults and loses to the caller.

use std::ffi::CString;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::ucp_config;
use crate::library::{Library, Version};
use crate::{globals, log, status};

/// The hosts that a default is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Every one.
    All,
    /// Those with an RDMA device.
    Rdma,
    /// Those with an EFA device.
    Efa,
}

impl Hosts {
    /// What is missing for this to be such a host.
    fn lacks(self) -> Option<&'static str> {
        match self {
            Self::Rdma if !has_rdma_device() => Some("no RDMA device on this host"),
            Self::Efa if !globals::has_efa() => Some("no EFA device on this host"),
            _ => None,
        }
    }
}

/// A default of ours.
pub struct DefaultSetting {
    /// UCX's name, without `UCX_`.
    pub name: &'static str,
    /// The value.
    pub value: &'static str,
    /// The first release that knows the name.
    pub since: Version,
    /// On which hosts it is applied.
    pub hosts: Hosts,
    /// What it is good for, and what it costs.
    pub why: &'static str,
}

/// Our defaults: what matters between RDMA adapters and isn't UCX's own default yet, and what is unsafe in it.
pub const DEFAULTS: &[DefaultSetting] = &[
    DefaultSetting {
        name: "TLS",
        value: "^tcp",
        since: Version::OLDEST,
        hosts: Hosts::All,
        why: "UCX's TCP listens on a port of its own and writes wherever a packet says, checking nothing and whatever \
              the other end was allowed. pdkv's `tcp` does its work; name `tcp` here only in a network of trusted hosts. \
              Where UCX has `cuda_ipc` this is `^tcp,cuda_ipc`: it would put into a key what maps the whole of an allocation, for as \
              long as UCX likes; pdkv's `cuda` lends regions, to processes of the same user",
    },
    DefaultSetting {
        name: "MAX_RMA_RAILS",
        value: "2",
        since: Version::new(1, 14, 0),
        hosts: Hosts::Rdma,
        why: "one transfer may use two adapters; UCX's own default is one. Over sockets it would send half of each put \
              through the slower device",
    },
    DefaultSetting {
        name: "RNDV_THRESH",
        value: "inf",
        since: Version::OLDEST,
        hosts: Hosts::All,
        why: "a message goes by rendezvous only where the sender says so, so that the receiver's memory for \
              unexpected messages is the sender's decision and not a matter of tuning",
    },
    DefaultSetting {
        name: "PROTO_INDIRECT_ID",
        value: "y",
        since: Version::OLDEST,
        hosts: Hosts::All,
        why: "what a peer names in its messages is looked up in a table; otherwise, where no lost peers are watched \
              for, it would be an address that UCX believes",
    },
    DefaultSetting {
        name: "IB_PCI_RELAXED_ORDERING",
        value: "try",
        since: Version::OLDEST,
        hosts: Hosts::Rdma,
        why: "lets the PCIe root reorder an adapter's writes, which some hosts need for full bandwidth. A flush \
              still orders",
    },
    DefaultSetting {
        name: "RC_FENCE",
        value: "none",
        since: Version::new(1, 14, 0),
        hosts: Hosts::Rdma,
        why: "no extra fence between operations of a queue pair; nothing here relies on order before a flush",
    },
    DefaultSetting {
        name: "MAX_HCA_PER_GPU",
        value: "auto",
        since: Version::new(1, 21, 0),
        hosts: Hosts::Rdma,
        why: "a GPU uses the adapters near it and not every one in the host",
    },
    DefaultSetting {
        name: "RNDV_PIPELINE_ERROR_HANDLING",
        value: "y",
        since: Version::new(1, 22, 0),
        hosts: Hosts::Rdma,
        why: "keeps the pipelined rendezvous available when endpoints watch for a lost peer",
    },
    DefaultSetting {
        name: "ADDRESS_VERSION",
        value: "v2",
        since: Version::new(1, 14, 0),
        hosts: Hosts::Efa,
        why: "the old form of a worker's address has no room for what EFA's transport says in it. Both ends set it, \
              since both have the device",
    },
    DefaultSetting {
        name: "MAX_COMPONENT_MDS",
        value: "32",
        since: Version::new(1, 18, 0),
        hosts: Hosts::Rdma,
        why: "hosts with many adapters have more than UCX's default of 16 memory domains",
    },
];

/// What `TLS` is by default where UCX has `cuda_ipc`: it warns of a name that it has not, so this is not said everywhere.
const TLS_WITH_CUDA_IPC: &str = "^tcp,cuda_ipc";

/// What the caller wants to be different.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    wanted: Vec<(String, String)>,
}

/// Where a setting's value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Our default.
    Ours,
    /// The environment says something else than our default, or the same.
    Environment,
    /// The caller asked for it.
    Caller,
    /// Our default was not applied; why.
    Skipped(String),
}

/// One setting as it was resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// UCX's name, without `UCX_`.
    pub name: String,
    /// The value in force, or the one that was not applied.
    pub value: String,
    /// Where it comes from.
    pub source: Source,
}

impl Settings {
    /// Wishes as (name, value); a name may be written with or without `UCX_`.
    pub fn new(wanted: impl IntoIterator<Item = (String, String)>) -> Self {
        let bare = |name: String| name.strip_prefix("UCX_").map_or(name.clone(), str::to_owned);
        Self {
            wanted: wanted.into_iter().map(|(name, value)| (bare(name), value)).collect(),
        }
    }

    /// The wishes, names without `UCX_`.
    pub fn wanted(&self) -> &[(String, String)] {
        &self.wanted
    }

    /// Puts everything into a configuration that was just read.
    pub(crate) fn apply(&self, library: &Library, config: *mut ucp_config, has_cuda_ipc: bool) -> Result<Vec<Setting>> {
        let mut resolved = Vec::new();
        for default in DEFAULTS {
            if self.wanted.iter().any(|(name, _)| name == default.name) {
                continue;
            }
            let value = match default.name {
                "TLS" if has_cuda_ipc => TLS_WITH_CUDA_IPC,
                _ => default.value,
            };
            resolved.push(apply_default(library, config, default, value));
        }
        for (name, value) in &self.wanted {
            modify(library, config, name, value).map_err(|error| refused(library, name, value, &error))?;
            resolved.push(Setting {
                name: name.clone(),
                value: value.clone(),
                source: Source::Caller,
            });
        }
        resolved.extend(library.globals().iter().cloned());
        Ok(resolved)
    }
}

fn apply_default(library: &Library, config: *mut ucp_config, default: &DefaultSetting, ours: &str) -> Setting {
    let setting = |value: String, source| Setting {
        name: default.name.to_owned(),
        value,
        source,
    };
    if let Ok(value) = std::env::var(format!("UCX_{}", default.name)) {
        return setting(value, Source::Environment);
    }
    if let Some(lack) = default.hosts.lacks() {
        return setting(ours.to_owned(), Source::Skipped(lack.to_owned()));
    }
    if default.name == "PROTO_INDIRECT_ID" && library.has_assertions() {
        let reason = "this copy has assertions, one of which forbids to destroy a worker then".to_owned();
        return setting(ours.to_owned(), Source::Skipped(reason));
    }
    if library.version() < default.since {
        let reason = format!("UCX {} doesn't have it", library.version());
        return setting(ours.to_owned(), Source::Skipped(reason));
    }
    if modify(library, config, default.name, ours).is_ok() {
        return setting(ours.to_owned(), Source::Ours);
    }
    let reason = "this copy of UCX doesn't have it".to_owned();
    setting(ours.to_owned(), Source::Skipped(reason))
}

fn has_rdma_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

fn modify(library: &Library, config: *mut ucp_config, name: &str, value: &str) -> Result<()> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| Error::new(ErrorKind::Config, "configure UCX", "a setting holds a zero byte"))
    };
    let (c_name, c_value) = (text(name)?, text(value)?);
    log::take_last();
    // SAFETY: a configuration that `ucp_config_read` made and nobody released, and two C strings, copied by UCX.
    let status = unsafe { (library.ucp().ucp_config_modify)(config, c_name.as_ptr(), c_value.as_ptr()) };
    status::check("configure UCX", status)
}

fn refused(library: &Library, name: &str, value: &str, cause: &Error) -> Error {
    Error::new(
        ErrorKind::Config,
        "configure UCX",
        format!(
            "UCX {} refuses `{name}` = `{value}`: {}",
            library.version(),
            cause.message()
        ),
    )
    .with_hint("`ucx_info -f` of that copy lists its settings and their values")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_prefix() {
        let settings = Settings::new([
            ("UCX_TLS".to_owned(), "tcp".to_owned()),
            ("TLS".to_owned(), "rc".to_owned()),
        ]);
        assert!(settings.wanted().iter().all(|(name, _)| name == "TLS"));
    }

    #[test]
    fn every_default_says_why_and_none_is_there_twice() {
        for (at, default) in DEFAULTS.iter().enumerate() {
            assert!(default.why.len() > 30, "{}", default.name);
            assert!(!default.name.starts_with("UCX_"));
            assert!(DEFAULTS[..at].iter().all(|other| other.name != default.name));
        }
    }
}
