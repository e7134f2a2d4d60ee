//! The functions that are looked up by name when a library is loaded.
//!
//! `Ucp` and `Ucs` are tables of function pointers. What 1.13 has is required; what came later is an `Option`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use pdkv_core::{Error, ErrorKind, Result};

use super::structs::*;
use crate::symbols::Object;

macro_rules! table {
    (
        $(#[doc = $doc:literal])+
        $name:ident {
            $( $symbol:ident($($argument:ty),* $(,)?) $(-> $result:ty)?; )*
        }
        optional {
            $( $later:ident($($later_argument:ty),* $(,)?) $(-> $later_result:ty)?; )*
        }
    ) => {
        $(#[doc = $doc])+
        #[allow(clippy::struct_field_names, reason = "the names are C's")]
        pub(crate) struct $name {
            $( pub(crate) $symbol: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
            $( pub(crate) $later: Option<unsafe extern "C" fn($($later_argument),*) $(-> $later_result)?>, )*
        }

        impl $name {
            /// Resolves every name.
            ///
            /// # Errors
            /// `Unsupported` that names the first required symbol that is missing.
            pub(crate) fn resolve(object: &Object) -> Result<Self> {
                Ok(Self {
                    $( $symbol: {
                        let address = object.symbol(stringify!($symbol)).ok_or_else(|| missing(stringify!($symbol)))?;
                        // SAFETY: the symbol of this name is the C function whose type the field states; the
                        // object is never unloaded, so the pointer stays good.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    }, )*
                    $( $later: object.symbol(stringify!($later)).map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($later_argument),*) $(-> $later_result)?>(address) }
                    }), )*
                })
            }
        }
    };
}

fn missing(symbol: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "load UCX",
        format!("the library has no function `{symbol}`"),
    )
    .with_hint("UCX 1.13 or newer is needed")
}

table! {
    /// The functions of libucp.
    Ucp {
        ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
        ucp_lib_query(*mut ucp_lib_attr_t) -> ucs_status_t;
        ucp_config_read(*const c_char, *const c_char, *mut *mut ucp_config) -> ucs_status_t;
        ucp_config_modify(*mut ucp_config, *const c_char, *const c_char) -> ucs_status_t;
        ucp_config_release(*mut ucp_config);
        ucp_init_version(c_uint, c_uint, *const ucp_params_t, *const ucp_config, *mut ucp_context_h) -> ucs_status_t;
        ucp_context_print_info(ucp_context_h, *mut libc::FILE);
        ucp_context_query(ucp_context_h, *mut ucp_context_attr_t) -> ucs_status_t;
        ucp_cleanup(ucp_context_h);
        ucp_worker_create(ucp_context_h, *const ucp_worker_params_t, *mut ucp_worker_h) -> ucs_status_t;
        ucp_worker_destroy(ucp_worker_h);
        ucp_worker_query(ucp_worker_h, *mut ucp_worker_attr_t) -> ucs_status_t;
        ucp_worker_release_address(ucp_worker_h, *mut ucp_address);
        ucp_worker_progress(ucp_worker_h) -> c_uint;
        ucp_worker_get_efd(ucp_worker_h, *mut c_int) -> ucs_status_t;
        ucp_worker_arm(ucp_worker_h) -> ucs_status_t;
        ucp_worker_set_am_recv_handler(ucp_worker_h, *const ucp_am_handler_param_t) -> ucs_status_t;
        ucp_ep_create(ucp_worker_h, *const ucp_ep_params_t, *mut ucp_ep_h) -> ucs_status_t;
        ucp_ep_query(ucp_ep_h, *mut ucp_ep_attr_t) -> ucs_status_t;
        ucp_ep_print_info(ucp_ep_h, *mut libc::FILE);
        ucp_ep_close_nbx(ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_ep_flush_nbx(ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_mem_map(ucp_context_h, *const ucp_mem_map_params_t, *mut ucp_mem_h) -> ucs_status_t;
        ucp_mem_unmap(ucp_context_h, ucp_mem_h) -> ucs_status_t;
        ucp_ep_rkey_unpack(ucp_ep_h, *const c_void, *mut ucp_rkey_h) -> ucs_status_t;
        ucp_rkey_pack(ucp_context_h, ucp_mem_h, *mut *mut c_void, *mut usize) -> ucs_status_t;
        ucp_rkey_buffer_release(*mut c_void);
        ucp_rkey_destroy(ucp_rkey_h);
        ucp_put_nbx(ucp_ep_h, *const c_void, usize, u64, ucp_rkey_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_get_nbx(ucp_ep_h, *mut c_void, usize, u64, ucp_rkey_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_am_send_nbx(ucp_ep_h, c_uint, *const c_void, usize, *const c_void, usize, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_am_recv_data_nbx(ucp_worker_h, *mut c_void, *mut c_void, usize, *const ucp_request_param_t) -> ucs_status_ptr_t;
        ucp_am_data_release(ucp_worker_h, *mut c_void);
        ucp_request_query(*mut c_void, *mut ucp_request_attr_t) -> ucs_status_t;
        ucp_request_free(*mut c_void);
    }
    optional {}
}

/// Called with each log line: file, line, function, level, component, format, arguments.
pub(crate) type LogHandler = unsafe extern "C" fn(
    *const c_char,
    c_uint,
    *const c_char,
    c_uint,
    *const c_void,
    *const c_char,
    *mut c_void,
) -> c_uint;

table! {
    /// The functions of libucs, which libucp brings along.
    Ucs {
    }
    optional {
        ucs_log_push_handler(LogHandler);
        ucs_global_opts_set_value(*const c_char, *const c_char) -> ucs_status_t;
    }
}
