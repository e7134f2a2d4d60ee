//! A transport and the device it runs on, as UCX names them, and what kind of link that is.
//!
//! UCX has no call that tells the kind; the names are its interface, and this is the one table of them.

use std::fmt;

/// What carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// A network adapter that reads and writes registered memory by itself.
    Rdma,
    /// A segment of memory that both processes map; UCX copies into it and out of it.
    SharedMemory,
    /// The kernel copies from process to process and checks every address.
    KernelCopy,
    /// A socket.
    Socket,
    /// A GPU's copy engine, or peer memory mapped into the GPU.
    Gpu,
    /// The process itself.
    Loopback,
    /// A name this table doesn't know.
    Unknown,
}

impl Link {
    /// The word shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::SharedMemory => "shared memory",
            Self::KernelCopy => "kernel copy",
            Self::Socket => "socket",
            Self::Gpu => "gpu",
            Self::Loopback => "loopback",
            Self::Unknown => "unknown",
        }
    }
}

/// One way out of the process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Resource {
    /// UCX's name of the transport, such as `rc_mlx5`.
    pub transport: String,
    /// UCX's name of the device, such as `mlx5_0:1`.
    pub device: String,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.transport, self.device)
    }
}

impl Resource {
    /// Makes one from `transport/device`.
    pub fn parse(text: &str) -> Option<Self> {
        let (transport, device) = text.trim().split_once('/')?;
        let plain = |part: &str| !part.is_empty() && !part.contains(char::is_whitespace);
        (plain(transport) && plain(device)).then(|| Self {
            transport: transport.to_owned(),
            device: device.to_owned(),
        })
    }

    /// What kind of link it is.
    pub fn link(&self) -> Link {
        match self.transport.as_str() {
            "posix" | "sysv" | "xpmem" | "mm" => Link::SharedMemory,
            "cma" | "knem" => Link::KernelCopy,
            "tcp" | "sockcm" => Link::Socket,
            "self" => Link::Loopback,
            name if ["rc_", "dc_", "ud_", "gga_", "srd"]
                .iter()
                .any(|start| name.starts_with(start)) =>
            {
                Link::Rdma
            }
            "rc" | "dc" | "ud" | "ib" | "ugni_rdma" => Link::Rdma,
            name if ["cuda_", "gdr_", "rocm_", "ze_"]
                .iter()
                .any(|start| name.starts_with(start)) =>
            {
                Link::Gpu
            }
            _ => Link::Unknown,
        }
    }

    /// Whether an RDMA adapter carries it.
    pub fn is_rdma(&self) -> bool {
        self.link() == Link::Rdma
    }

    /// Whether it stays on this host, in the kernel or in shared memory.
    pub fn is_local(&self) -> bool {
        matches!(self.link(), Link::SharedMemory | Link::KernelCopy | Link::Loopback)
    }
}

/// The resources in what `ucp_context_print_info` or `ucp_ep_print_info` prints, without repetition.
///
/// A context's lines end in `-- tcp/lo`; an endpoint's lanes read `lane[0]:  2:tcp/lo.0 md[1] ...`.
pub(crate) fn in_print(text: &str) -> Vec<Resource> {
    let mut found: Vec<Resource> = Vec::new();
    for line in text.lines() {
        let name = if let Some((head, tail)) = line.split_once(" -- ") {
            head.contains("resource").then_some(tail)
        } else if line.contains("lane[") {
            line.split_once("]:")
                .and_then(|(_, tail)| tail.trim().split_once(':'))
                .map(|(_, tail)| tail)
        } else {
            None
        };
        let word = name.and_then(|name| name.split_whitespace().next());
        let resource = word.map(without_path).and_then(Resource::parse);
        if let Some(resource) = resource.filter(|resource| !found.contains(resource)) {
            found.push(resource);
        }
    }
    found
}

/// `tcp/lo.0` without the number of the path on the device.
fn without_path(word: &str) -> &str {
    match word.rsplit_once('.') {
        Some((name, number)) if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_link() {
        let link = |name: &str| Resource::parse(name).map(|resource| resource.link());
        assert_eq!(link("rc_mlx5/mlx5_0:1"), Some(Link::Rdma));
        assert_eq!(link("srd/rdmap0s6:1"), Some(Link::Rdma));
        assert_eq!(link("cma/memory"), Some(Link::KernelCopy));
        assert_eq!(link("posix/memory"), Some(Link::SharedMemory));
        assert_eq!(link("tcp/eth0"), Some(Link::Socket));
        assert_eq!(link("cuda_ipc/cuda"), Some(Link::Gpu));
        assert_eq!(link("carrier_pigeon/coop"), Some(Link::Unknown));
        assert_eq!(link("nonsense"), None);
    }

    #[test]
    fn a_context_and_an_endpoint_are_read_from_their_print() {
        let context = "#     component 1  :  tcp\n#      resource 0  :  md 0  dev 0  flags -- self/memory\n\
                       #      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n";
        let names: Vec<String> = in_print(context).iter().map(Resource::to_string).collect();
        assert_eq!(names, ["self/memory", "tcp/eth0"]);
        let endpoint = "#                 lane[0]:  4:posix/memory.0 md[3]   -> md[3]/posix/sysdev[255] am am_bw#0\n\
                        #                 lane[1]:  5:cma/memory.0 md[4]     -> md[4]/cma/sysdev[255] rma_bw#0\n";
        let names: Vec<String> = in_print(endpoint).iter().map(Resource::to_string).collect();
        assert_eq!(names, ["posix/memory", "cma/memory"]);
    }
}
