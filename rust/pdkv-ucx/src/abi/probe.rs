//! The comparison with C: a program compiled against installed headers says sizes, offsets and values.
//!
//! UCX's structs grow at their end. A field that a header doesn't have yet must lie, in our table, past the
//! end of the struct there; everything else must be equal. Where no headers are installed the test says so.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it compared")]

use std::path::{Path, PathBuf};
use std::process::Command;

use super::sgl::{ucp_dt_local_sgl_t, ucp_dt_remote_sgl_t};
use super::structs::*;
use super::{constants, sgl};

/// A struct: its size and where its fields are, those of later releases apart.
struct Layout {
    name: &'static str,
    size: usize,
    fields: Vec<(&'static str, usize)>,
    later: Vec<(&'static str, usize)>,
}

macro_rules! layout {
    ($name:ident { $($field:ident),+ $(,)? } $(later { $($later:ident),+ })?) => {
        Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: vec![ $( (stringify!($field), std::mem::offset_of!($name, $field)), )+ ],
            later: vec![ $( $( (stringify!($later), std::mem::offset_of!($name, $later)), )+ )? ],
        }
    };
}

fn layouts() -> Vec<Layout> {
    vec![
        layout!(ucp_params_t {
            field_mask, features, request_size, request_init, request_cleanup, tag_sender_mask, mt_workers_shared,
            estimated_num_eps, estimated_num_ppn, name,
        } later { node_local_id }),
        layout!(ucp_context_attr_t {
            field_mask, request_size, thread_mode, memory_types, name,
        } later { device_counter_size }),
        layout!(ucp_lib_attr_t {
            field_mask,
            max_thread_level
        }),
        layout!(ucp_worker_params_t {
            field_mask,
            thread_mode,
            cpu_mask,
            events,
            user_data,
            event_fd,
            flags,
            name,
            am_alignment,
            client_id,
        }),
        layout!(ucp_worker_attr_t {
            field_mask,
            thread_mode,
            address_flags,
            address,
            address_length,
            max_am_header,
            name,
            max_debug_string,
        }),
        layout!(ucp_err_handler_t { cb, arg }),
        layout!(ucs_sock_addr_t { addr, addrlen }),
        layout!(ucp_ep_params_t {
            field_mask,
            address,
            err_mode,
            err_handler,
            user_data,
            flags,
            sockaddr,
            conn_request,
            name,
            local_sockaddr,
        }),
        layout!(ucp_ep_attr_t { field_mask, name, local_sockaddr, remote_sockaddr } later { transports, user_data }),
        layout!(ucp_mem_map_params_t {
            field_mask, address, length, flags, prot, memory_type,
        } later { exported_memh_buffer }),
        layout!(ucp_request_param_t {
            op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type, recv_info, memh,
        } later { remote_datatype, remote, remote_count }),
        layout!(ucp_request_attr_t {
            field_mask,
            debug_string,
            debug_string_size,
            status,
            mem_type
        }),
        layout!(ucp_am_handler_param_t {
            field_mask,
            id,
            flags,
            cb,
            arg
        }),
        layout!(ucp_am_recv_param_t { recv_attr, reply_ep }),
        layout!(ucp_dt_iov_t { buffer, length }),
    ]
}

/// Structs that whole releases lack.
fn later_layouts() -> Vec<Layout> {
    vec![
        layout!(ucp_transport_entry_t {
            transport_name,
            device_name
        }),
        layout!(ucp_transports_t {
            entries,
            num_entries,
            entry_size
        }),
        layout!(ucp_dt_local_sgl_t {
            field_mask,
            buffers,
            lengths,
            memhs,
            counts,
            strides
        }),
        layout!(ucp_dt_remote_sgl_t {
            field_mask,
            remote_addrs,
            lengths,
            rkeys
        }),
    ]
}

const SIZES: [(&str, usize); 4] = [
    ("ucs_status_t", size_of::<ucs_status_t>()),
    ("ucs_status_ptr_t", size_of::<ucs_status_ptr_t>()),
    ("ucs_memory_type_t", 4),
    ("ucs_thread_mode_t", 4),
];

/// A C compiler with one folder of headers.
struct Compiler {
    include: PathBuf,
    scratch: PathBuf,
}

impl Compiler {
    /// Compiles and runs a program that prints; `None` when it doesn't compile.
    fn run(&self, body: &str) -> Option<String> {
        let (source, program) = (self.scratch.join("probe.c"), self.scratch.join("probe"));
        let text = format!(
            "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\n#include <ucs/debug/log_def.h>\n\
             int main(void) {{\n{body}\nreturn 0;\n}}\n"
        );
        std::fs::write(&source, text).unwrap();
        let compiled = Command::new("cc")
            .args(["-w", "-I"])
            .args([&self.include, Path::new("-o"), &program, &source])
            .output()
            .expect("a C compiler is needed to compare with C");
        if !compiled.status.success() {
            return None;
        }
        let output = Command::new(&program).output().unwrap();
        Some(String::from_utf8(output.stdout).unwrap())
    }

    /// The values of C expressions.
    fn values(&self, expressions: &[String]) -> Option<Vec<i128>> {
        let lines: Vec<String> = expressions
            .iter()
            .map(|expression| format!("printf(\"%lld\\n\", (long long)({expression}));"))
            .collect();
        Some(
            self.run(&lines.join("\n"))?
                .lines()
                .map(|line| line.parse().unwrap())
                .collect(),
        )
    }

    fn value(&self, expression: &str) -> Option<i128> {
        self.values(&[expression.to_owned()])?.pop()
    }
}

/// Everything that must be equal: what it is called in C, and what we say.
fn compare(compiler: &Compiler, what: &[(String, i128)]) -> Vec<String> {
    let expressions: Vec<String> = what.iter().map(|(expression, _)| expression.clone()).collect();
    let values = compiler
        .values(&expressions)
        .expect("the headers have every name of the table");
    let pairs = what.iter().zip(values);
    pairs
        .filter(|((_, ours), theirs)| ours != theirs)
        .map(|((name, ours), theirs)| format!("{name}: {ours} here, {theirs} in C"))
        .collect()
}

fn differences(compiler: &Compiler) -> Vec<String> {
    let mut equal: Vec<(String, i128)> = SIZES
        .iter()
        .map(|(name, size)| (format!("sizeof({name})"), *size as i128))
        .collect();
    let mut wrong = Vec::new();
    let later = constants::transports::ALL.iter().chain(sgl::ALL);
    for (name, value) in constants::ALL {
        equal.push(((*name).to_owned(), *value));
    }
    for (name, value) in later {
        if compiler.value(name).is_some() {
            equal.push(((*name).to_owned(), *value));
        }
    }
    let known = later_layouts()
        .into_iter()
        .filter(|layout| compiler.value(&format!("sizeof({})", layout.name)).is_some());
    for layout in layouts().into_iter().chain(known) {
        let offset_of = |field: &str| format!("offsetof({}, {field})", layout.name);
        let whole = compiler
            .value(&format!("sizeof({})", layout.name))
            .expect("every release has the struct");
        equal.extend(
            layout
                .fields
                .iter()
                .map(|(field, offset)| (offset_of(field), *offset as i128)),
        );
        let (there, missing): (Vec<_>, Vec<_>) = layout
            .later
            .iter()
            .partition(|(field, _)| compiler.value(&offset_of(field)).is_some());
        equal.extend(there.iter().map(|(field, offset)| (offset_of(field), *offset as i128)));
        for (field, offset) in &missing {
            if (*offset as i128) < whole {
                wrong.push(format!(
                    "{}.{field} at {offset} lies inside the {whole} bytes of C",
                    layout.name
                ));
            }
        }
        if missing.is_empty() && whole != layout.size as i128 {
            wrong.push(format!("{} has {} bytes here, {whole} in C", layout.name, layout.size));
        }
    }
    wrong.extend(compare(compiler, &equal));
    wrong
}

/// Whether the headers have every name of later releases, as those of 1.22 must: a misspelt one would never be compared.
fn complete(compiler: &Compiler) -> bool {
    let constants = constants::transports::ALL
        .iter()
        .chain(sgl::ALL)
        .all(|(name, _)| compiler.value(name).is_some());
    let fields = |layout: &Layout| {
        let mut fields = layout.fields.iter().chain(&layout.later);
        fields.all(|(field, _)| compiler.value(&format!("offsetof({}, {field})", layout.name)).is_some())
    };
    constants && layouts().iter().chain(&later_layouts()).all(fields)
}

/// The folders with UCX's headers: the system's, and those beside the copies named by `PDKV_TEST_UCX`.
fn includes() -> Vec<PathBuf> {
    let named = std::env::var("PDKV_TEST_UCX").unwrap_or_default();
    let beside = named
        .split(':')
        .filter_map(|path| Some(Path::new(path).parent()?.parent()?.join("include")));
    [PathBuf::from("/usr/include"), PathBuf::from("/usr/local/include")]
        .into_iter()
        .chain(beside)
        .filter(|folder| folder.join("ucp/api/ucp.h").exists())
        .collect()
}

#[test]
fn every_size_offset_and_constant_is_as_in_the_headers() {
    let includes = includes();
    if includes.is_empty() {
        assert!(
            std::env::var_os("PDKV_UCX_REQUIRED").is_none(),
            "no headers of UCX, and PDKV_UCX_REQUIRED is set"
        );
        println!("skipped: no headers of UCX on this system");
    }
    for (at, include) in includes.into_iter().enumerate() {
        let scratch = std::env::temp_dir().join(format!("pdkv-abi-{}-{at}", std::process::id()));
        std::fs::create_dir_all(&scratch).unwrap();
        let compiler = Compiler {
            include: include.clone(),
            scratch: scratch.clone(),
        };
        let wrong = differences(&compiler);
        let minor = compiler.value("UCP_API_MINOR").unwrap_or_default();
        assert!(
            minor < 22 || complete(&compiler),
            "{}: a name of the table is no name in C",
            include.display()
        );
        std::fs::remove_dir_all(&scratch).unwrap();
        println!("{}: UCX 1.{}", include.display(), minor);
        assert!(wrong.is_empty(), "{}: {wrong:#?}", include.display());
    }
}
