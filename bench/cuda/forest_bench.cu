// Checks and times the tree operations of several sequences as ggml's CUDA backend calls them, without the rest of the backend.
//
//   G=<patched llama.cpp>/ggml; I="-I. -I$G/include -I$G/src -I$G/src/ggml-cuda"; touch ggml-version.h
//   gcc -O2 -c $I -D_GNU_SOURCE -DGGML_VERSION='""' -DGGML_COMMIT='""' $G/src/ggml.c
//   for f in gated-delta-net-tree ssm-conv-tree fused-delta-net-input; do C="$C $G/src/ggml-cuda/$f.cu"; done
//   nvcc -O3 -std=c++17 -use_fast_math -extended-lambda --expt-relaxed-constexpr -arch=native $I bench/cuda/forest_bench.cu $C ggml.o \
//        -Xcompiler -no-pie -Xlinker -no-pie -Xlinker --unresolved-symbols=ignore-all -o forest_bench
//   ./forest_bench check    against float64: result rows, states, windows; fused and not; what must not be touched
//   ./forest_bench small    a few of these, for compute-sanitizer
//   ./forest_bench time     27B shape, 48 layers, several sequences
//   ./forest_bench tree     one sequence

#include "common.cuh"
#include "gated-delta-net-tree.cuh"
#include "ssm-conv-tree.cuh"
#include "fused-delta-net-input.cuh"
#include "ggml-impl.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>
#include <functional>

// ---- what the backend has in ggml-cuda.cu -------------------------------------------------------------------------------

const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info = [] {
        ggml_cuda_device_info r = {};
        cudaDeviceProp prop;
        cudaGetDeviceProperties(&prop, 0);
        r.device_count          = 1;
        r.physical_device_count = 1;
        r.devices[0].cc         = 100*prop.major + 10*prop.minor;
        r.devices[0].nsm        = prop.multiProcessorCount;
        r.devices[0].smpb       = prop.sharedMemPerBlock;
        r.devices[0].smpbo      = prop.sharedMemPerBlockOptin;
        r.devices[0].warp_size  = 32;
        return r;
    }();
    return info;
}
void ggml_cuda_set_device(int) {}
int  ggml_cuda_get_device() { return 0; }
[[noreturn]] void ggml_cuda_error(const char * stmt, const char * func, const char * file, int line, const char * msg) {
    printf("%s:%d %s %s: %s\n", file, line, func, stmt, msg);
    abort();
}
struct simple_pool : ggml_cuda_pool {
    void * alloc(size_t size, size_t * actual) override { void * p; cudaMalloc(&p, size); *actual = size; return p; }
    void free(void *, size_t) override {}
};
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) { return std::unique_ptr<ggml_cuda_pool>(new simple_pool); }
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

extern "C" void ggml_critical_section_start(void) {}
extern "C" void ggml_critical_section_end(void) {}

// ---- tensors ------------------------------------------------------------------------------------------------------------

static ggml_context * C;
static std::mt19937 rng(1);
static std::vector<void *> memory;

static ggml_tensor * dev(ggml_tensor * t) {
    cudaMalloc(&t->data, ggml_nbytes(t) + 256);
    cudaMemset(t->data, 0xff, ggml_nbytes(t));
    memory.push_back(t->data);
    return t;
}
static void clear() {
    cudaDeviceSynchronize();
    for (void * p : memory) cudaFree(p);
    memory.clear();
    ggml_reset(C);
}
static ggml_tensor * fill(ggml_tensor * t, const std::function<float(int64_t)> & f) {
    std::vector<float> x(ggml_nelements(t));
    for (size_t i = 0; i < x.size(); ++i) x[i] = f(i);
    cudaMemcpy(dev(t)->data, x.data(), x.size()*4, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
    return t;
}
static ggml_tensor * ints(const std::vector<int32_t> & x, int64_t ne0, int64_t ne1 = 1) {
    ggml_tensor * t = dev(ggml_new_tensor_2d(C, GGML_TYPE_I32, ne0, ne1));
    cudaMemcpy(t->data, x.data(), x.size()*4, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
    return t;
}
static std::vector<float> host(const ggml_tensor * t) {
    std::vector<float> x(ggml_nbytes(t)/4);
    cudaMemcpy(x.data(), t->data, ggml_nbytes(t), cudaMemcpyDeviceToHost);
    return x;
}
static float uni(float a, float b) { return std::uniform_real_distribution<float>(a, b)(rng); }
static float nor() { return std::normal_distribution<float>()(rng); }
static ggml_tensor * view_like(ggml_tensor * v) { v->data = (char *) v->view_src->data + v->view_offs; return v; }

struct forest {
    std::vector<int32_t> seqs, parents;
    int n = 0, n_seqs;
    forest(const std::vector<int> & widths, int n_slots, int spare, int reach = 6) : n_seqs(widths.size()) {
        std::vector<int> slots(n_slots);
        for (int i = 0; i < n_slots; ++i) slots[i] = i;
        std::shuffle(slots.begin(), slots.end(), rng);
        for (size_t i = 0; i < widths.size(); ++i) {
            seqs.insert(seqs.end(), { widths[i] ? slots[i] : -1, widths[i] ? n : -1, widths[i] });
            for (int j = 0; j < widths[i]; ++j) parents.push_back(j == 0 ? -1 : std::uniform_int_distribution<int>(std::max(0, j - reach), j - 1)(rng));
            n += widths[i];
        }
        for (int i = 0; i < spare; ++i) parents.push_back(-1);
        n += spare;
    }
};

static double worst;
static int n_bits; // values of states that differ between the two ways of advancing
static void near(const char * what, const std::vector<double> & a, const std::vector<double> & b, double tol) {
    double m = 1e-30, d = 0;
    for (size_t i = 0; i < a.size(); ++i) { m = std::max(m, fabs(b[i])); d = std::max(d, a[i] == a[i] ? fabs(a[i] - b[i]) : 1e30); }
    worst = std::max(worst, d/m/tol);
    if (d > tol*m) printf("FAIL %s: %g of %g\n", what, d, m);
}

struct net { // one layer's inputs
    int S, H_k, H_v, n;
    ggml_tensor * q, * k, * v, * g, * beta;
    net(int S, int H_k, int H_v, int n) : S(S), H_k(H_k), H_v(H_v), n(n) {
        const float s = 1.7f/sqrtf(S);
        q = fill(ggml_new_tensor_3d(C, GGML_TYPE_F32, S, H_k, n), [&](int64_t) { return uni(-s, s); });
        k = fill(ggml_new_tensor_3d(C, GGML_TYPE_F32, S, H_k, n), [&](int64_t) { return uni(-s, s); });
        v = fill(ggml_new_tensor_3d(C, GGML_TYPE_F32, S, H_v, n), [&](int64_t) { return nor(); });
        g = fill(ggml_new_tensor_3d(C, GGML_TYPE_F32, 1, H_v, n), [&](int64_t) { return uni(-0.5f, -1e-4f); });
        beta = fill(ggml_new_tensor_3d(C, GGML_TYPE_F32, 1, H_v, n), [&](int64_t) { return uni(0, 1); });
    }
};

static ggml_tensor * layer_state(ggml_tensor * whole, int layer, int S, int H_v) {
    return view_like(ggml_view_4d(C, whole, S, S, H_v, whole->ne[3], whole->nb[1], S*whole->nb[1], whole->nb[3], layer*whole->nb[2]));
}

static void check_net(ggml_backend_cuda_context & ctx, int S, int H_k, int H_v, const std::vector<int> & widths, int spare, bool cached, bool advance) {
    const int n_slots = widths.size() + 2;
    forest f(widths, n_slots, spare);
    net in(S, H_k, H_v, f.n);
    ggml_tensor * whole = fill(ggml_new_tensor_4d(C, GGML_TYPE_F32, S, S*H_v, 2, n_slots), [&](int64_t) { return nor(); });
    const std::vector<float> before = host(whole);
    ggml_tensor * state = layer_state(whole, 1, S, H_v);
    ggml_tensor * parents = ints(f.parents, f.n), * seqs = ints(f.seqs, 3, f.n_seqs);
    ggml_tensor * out = dev(ggml_gated_delta_net_forest_persist(C, in.q, in.k, in.v, in.g, in.beta, state, parents, seqs));
    const int n_o = S*H_v, n_f = out->ne[0] - n_o, n_row = out->ne[0];
    ggml_tensor * cache = dev(ggml_new_tensor_3d(C, GGML_TYPE_F32, n_f, f.n + 3, 2));
    ggml_cuda_gdn_tree_cache c;
    if (cached) { c.data = (float *) cache->data; c.stride1 = n_f; c.stride2 = 0; }
    c.advance = advance;
    if (!ggml_cuda_gated_delta_net_tree_persist_supported(0, out)) { printf("not supported: %d %zu\n", S, widths.size()); return; }
    ggml_cuda_op_gated_delta_net_tree_persist(ctx, out, &c);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<float> rows = host(out), q = host(in.q), k = host(in.k), v = host(in.v), g = host(in.g), beta = host(in.beta), after = host(whole);
    if (cached) {
        const std::vector<float> copy = host(cache);
        for (int i = 0; i < f.n; ++i) for (int j = 0; j < n_f; ++j) if (copy[(size_t) i*n_f + j] != rows[(size_t) i*n_row + n_o + j]) { printf("FAIL copy\n"); i = f.n; break; }
    }
    // by states: every node has its own
    std::vector<double> ro, eo, ru, eu, rg, eg, es, rs;
    std::vector<bool> owned(f.n, false);
    std::vector<float> expect = before;
    for (int is = 0; is < f.n_seqs; ++is) {
        const int slot = f.seqs[3*is], c0 = f.seqs[3*is + 1], n = f.seqs[3*is + 2];
        for (int i = 0; i < n; ++i) owned[c0 + i] = true;
        for (int h = 0; n > 0 && h < H_v; ++h) {
            const size_t off = ((size_t) slot*2 + 1)*S*n_o + (size_t) h*S*S;
            std::vector<std::vector<double>> st(n);
            std::vector<double> gs(n);
            for (int i = 0; i < n; ++i) {
                const int ic = c0 + i, p = f.parents[ic];
                std::vector<double> s(S*S);
                for (int j = 0; j < S*S; ++j) s[j] = (p < 0 ? (double) before[off + j] : st[p][j])*exp((double) g[(size_t) ic*H_v + h]);
                gs[i] = g[(size_t) ic*H_v + h] + (p < 0 ? 0 : gs[p]);
                const float * kk = &k[((size_t) ic*H_k + h%H_k)*S], * qq = &q[((size_t) ic*H_k + h%H_k)*S];
                for (int j = 0; j < S; ++j) {
                    double d = 0;
                    for (int a = 0; a < S; ++a) d += s[(size_t) j*S + a]*kk[a];
                    const double u = beta[(size_t) ic*H_v + h]*(v[((size_t) ic*H_v + h)*S + j] - d);
                    double o = 0;
                    for (int a = 0; a < S; ++a) { s[(size_t) j*S + a] += u*kk[a]; o += s[(size_t) j*S + a]*qq[a]; }
                    eo.push_back(o/sqrt(S)); ro.push_back(rows[(size_t) ic*n_row + h*S + j]);
                    eu.push_back(u);         ru.push_back(rows[(size_t) ic*n_row + n_o + h*S + j]);
                }
                eg.push_back(gs[i]); rg.push_back(rows[(size_t) ic*n_row + n_row - H_v + h]);
                st[i] = s;
                if (h < H_k) for (int a = 0; a < S; ++a) if (rows[(size_t) ic*n_row + 2*n_o + h*S + a] != kk[a]) { printf("FAIL k\n"); return; }
            }
            if (advance && n == 1) {
                for (int j = 0; j < S*S; ++j) { es.push_back(st[0][j]); rs.push_back(after[off + j]); expect[off + j] = after[off + j]; }
            }
        }
    }
    near("o", ro, eo, 5e-6); near("u", ru, eu, 5e-6); near("G", rg, eg, 5e-6); near("advanced", rs, es, 5e-6);
    if (memcmp(expect.data(), after.data(), after.size()*4)) printf("FAIL states\n");
    for (int i = 0; i < f.n; ++i) if (!owned[i]) for (int j = 0; j < n_row; ++j) if (rows[(size_t) i*n_row + j] != 0) { printf("FAIL zeros\n"); return; }
    // the commit
    const int n_path = 5;
    std::vector<int32_t> path;
    for (int is = 0; is < f.n_seqs; ++is) {
        std::vector<int32_t> p;
        const int n = f.seqs[3*is + 2];
        if (n) for (int i = std::uniform_int_distribution<int>(0, n - 1)(rng); i >= 0; i = f.parents[f.seqs[3*is + 1] + i]) p.insert(p.begin(), i);
        if (is % 5 == 4) p.clear();
        p.resize(n_path, -1);
        if (n_path < (int) p.size()) p.resize(n_path);
        path.insert(path.end(), p.begin(), p.end());
    }
    for (int without = 0; without < 2; ++without) {
        cudaMemcpy(whole->data, before.data(), before.size()*4, cudaMemcpyHostToDevice);
        cudaDeviceSynchronize();
        ggml_tensor * live = view_like(ggml_view_4d(C, whole, S, n_o, n_slots, 1, whole->nb[1], whole->nb[3], whole->nb[2], whole->nb[2]));
        ggml_tensor * tail = view_like(ggml_view_3d(C, out, n_f, f.n, 1, out->nb[1], out->nb[2], n_o*4));
        ggml_tensor * com = ggml_gated_delta_net_forest_commit(C, live, tail, without ? nullptr : ints(path, n_path, f.n_seqs), seqs);
        com->data = live->data;
        if (!ggml_cuda_gated_delta_net_tree_commit_supported(com)) { printf("commit not supported\n"); return; }
        ggml_cuda_op_gated_delta_net_tree_commit(ctx, com);
        CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<float> now = host(whole);
        std::vector<double> rs2, es2;
        std::vector<float> exp2 = before;
        for (int is = 0; is < f.n_seqs; ++is) {
            const int slot = f.seqs[3*is], c0 = f.seqs[3*is + 1], n = f.seqs[3*is + 2];
            std::vector<int> nodes;
            for (int i = 0; n > 0 && i < n_path && (without ? (n == 1 && i == 0) : path[is*n_path + i] >= 0); ++i) nodes.push_back(without ? 0 : path[is*n_path + i]);
            if (nodes.empty()) continue;
            for (int h = 0; h < H_v; ++h) {
                const size_t off = ((size_t) slot*2 + 1)*S*n_o + (size_t) h*S*S;
                const double ge = rows[(size_t) (c0 + nodes.back())*n_row + n_row - H_v + h];
                for (int j = 0; j < S; ++j) for (int a = 0; a < S; ++a) {
                    double x = exp(ge)*before[off + (size_t) j*S + a];
                    for (int i : nodes) {
                        const float * r = &rows[(size_t) (c0 + i)*n_row];
                        x += exp(ge - r[n_row - H_v + h])*r[n_o + h*S + j]*r[2*n_o + h%H_k*S + a];
                    }
                    es2.push_back(x); rs2.push_back(now[off + (size_t) j*S + a]); exp2[off + (size_t) j*S + a] = now[off + (size_t) j*S + a];
                    if (without && advance && now[off + (size_t) j*S + a] != after[off + (size_t) j*S + a]) ++n_bits;
                }
            }
        }
        near(without ? "commit of one" : "commit", rs2, es2, 5e-6);
        if (memcmp(exp2.data(), now.data(), now.size()*4)) printf("FAIL other states\n");
    }
    clear();
}

// convolution, its activation, the norm of the first heads, gates and commit: one by one on the host, fused and not on the device
static void check_conv(ggml_backend_cuda_context & ctx, int S, int n_norm, int n_head, const std::vector<int> & widths, int spare, bool with_commit) {
    const int n_slots = widths.size() + 2, d = S*(n_norm + n_head), H = n_head;
    forest f(widths, n_slots, spare);
    ggml_tensor * whole = fill(ggml_new_tensor_4d(C, GGML_TYPE_F32, 3, d, 2, n_slots), [&](int64_t) { return nor(); });
    const std::vector<float> before = host(whole);
    ggml_tensor * window = view_like(ggml_view_3d(C, whole, 3, d, n_slots, whole->nb[1], whole->nb[3], whole->nb[2]));
    ggml_tensor * x = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, d, f.n), [&](int64_t) { return nor(); });
    ggml_tensor * w = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, 4, d), [&](int64_t) { return nor(); });
    ggml_tensor * alpha = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, H, f.n), [&](int64_t) { return 4*nor(); });
    ggml_tensor * beta0 = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, H, f.n), [&](int64_t) { return 4*nor(); });
    ggml_tensor * bias = fill(ggml_new_tensor_1d(C, GGML_TYPE_F32, H), [&](int64_t) { return nor(); });
    ggml_tensor * factor = fill(ggml_new_tensor_1d(C, GGML_TYPE_F32, H), [&](int64_t) { return -uni(0.1f, 2); });
    ggml_tensor * parents = ints(f.parents, f.n), * seqs = ints(f.seqs, 3, f.n_seqs);
    ggml_tensor * conv = dev(ggml_ssm_conv_forest(C, window, x, w, parents, seqs));
    ggml_tensor * silu = dev(ggml_silu(C, conv));
    ggml_tensor * heads = view_like(ggml_view_3d(C, silu, S, n_norm, f.n, S*4, silu->nb[1], 0));
    ggml_tensor * norm = dev(ggml_rms_norm(C, heads, 1e-6f/S));
    ggml_tensor * scale = dev(ggml_scale(C, norm, 1/sqrtf(S)));
    ggml_tensor * add = dev(ggml_add(C, alpha, bias));
    ggml_tensor * soft = dev(ggml_softplus(C, add));
    ggml_tensor * decay = dev(ggml_mul(C, soft, factor));
    ggml_tensor * beta = dev(ggml_sigmoid(C, beta0));
    ggml_tensor * x3 = view_like(ggml_view_3d(C, x, d, f.n, 1, x->nb[1], x->nb[2], 0));
    ggml_tensor * win4 = view_like(ggml_view_4d(C, whole, 3, d, n_slots, 1, whole->nb[1], whole->nb[3], whole->nb[2], whole->nb[2]));
    ggml_tensor * commit = ggml_ssm_conv_forest_commit(C, win4, x3, nullptr, seqs);
    commit->data = win4->data;
    ggml_cgraph * gr = ggml_new_graph(C);
    for (ggml_tensor * t : { scale, decay, beta }) ggml_build_forward_expand(gr, t);
    if (with_commit) ggml_build_forward_expand(gr, commit);
    ggml_build_forward_expand(gr, silu);
    int at = 0;
    while (gr->nodes[at]->op != GGML_OP_SSM_CONV_TREE) ++at;
    const int skipped = ggml_cuda_fused_delta_net_input(ctx, gr, at);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (gr->nodes[at + skipped] != (with_commit ? commit : beta)) printf("FAIL fused only %d of %d: %s\n", skipped, ggml_graph_n_nodes(gr), ggml_op_name(gr->nodes[at + skipped]->op));
    const std::vector<float> hx = host(x), hw = host(w), got = host(silu), gqk = host(scale), gd = host(decay), gb = host(beta), after = host(whole), ha = host(alpha), hbias = host(bias), hf = host(factor), hb0 = host(beta0);
    std::vector<double> e, r, eq, rq, eg, rg;
    std::vector<float> expect = before;
    for (int ic = 0; ic < f.n; ++ic) {
        int is = -1;
        for (int i = 0; i < f.n_seqs; ++i) if (ic >= f.seqs[3*i + 1] && ic < f.seqs[3*i + 1] + f.seqs[3*i + 2]) is = i;
        const int slot = is < 0 ? 0 : f.seqs[3*is], c0 = is < 0 ? 0 : f.seqs[3*is + 1];
        std::vector<double> y(d);
        for (int c = 0; c < d; ++c) {
            double s = 0;
            int ia = ic - c0;
            for (int j = 3; is >= 0 && j >= 0; --j) {
                const double in = ia >= 0 ? hx[(size_t) (c0 + ia)*d + c] : before[(((size_t) slot*2 + 1)*d + c)*3 + 3 + ia];
                s += in*hw[(size_t) c*4 + j];
                ia = ia >= 0 ? f.parents[c0 + ia] : ia - 1;
            }
            y[c] = s/(1 + exp(-s));
            e.push_back(y[c]); r.push_back(got[(size_t) ic*d + c]);
            if (with_commit && is >= 0 && f.seqs[3*is + 2] == 1) {
                float * st = &expect[(((size_t) slot*2 + 1)*d + c)*3];
                st[0] = st[1]; st[1] = st[2]; st[2] = hx[(size_t) ic*d + c];
            }
        }
        for (int h = 0; h < n_norm; ++h) {
            double sq = 0;
            for (int a = 0; a < S; ++a) sq += y[h*S + a]*y[h*S + a];
            for (int a = 0; a < S; ++a) { eq.push_back(y[h*S + a]/sqrt(sq + 1e-6)); rq.push_back(gqk[((size_t) ic*n_norm + h)*S + a]); }
        }
        for (int h = 0; h < H; ++h) {
            rg.push_back(gd[(size_t) ic*H + h]); rg.push_back(gb[(size_t) ic*H + h]);
            const double z = (double) ha[(size_t) ic*H + h] + hbias[h];
            eg.push_back(log1p(exp(z))*hf[h]); eg.push_back(1/(1 + exp(-(double) hb0[(size_t) ic*H + h])));
        }
    }
    near("conv", r, e, 5e-6); near("norm", rq, eq, 5e-6); near("gates", rg, eg, 5e-6);
    if (memcmp(expect.data(), after.data(), after.size()*4)) printf("FAIL windows\n");
    // unfused
    ggml_tensor * plain = dev(ggml_ssm_conv_forest(C, window, x, w, parents, seqs));
    cudaMemcpy(whole->data, before.data(), before.size()*4, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
    ggml_cuda_op_ssm_conv_tree(ctx, plain, silu);
    cudaDeviceSynchronize();
    const std::vector<float> again = host(silu);
    if (memcmp(again.data(), got.data(), got.size()*4)) printf("FAIL fused differs\n");
    ggml_cuda_op_ssm_conv_tree_commit(ctx, commit);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<float> committed = host(whole);
    if (with_commit && memcmp(committed.data(), after.data(), after.size()*4)) printf("FAIL commit differs\n");
    clear();
}

static float time_graph(ggml_backend_cuda_context & ctx, const std::function<void()> & body, int reps = 20) {
    cudaStream_t s = ctx.stream();
    cudaGraph_t graph; cudaGraphExec_t exec;
    body();
    CUDA_CHECK(cudaStreamSynchronize(s));
    CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    body();
    CUDA_CHECK(cudaStreamEndCapture(s, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> times;
    for (int i = 0; i < reps; ++i) {
        cudaEventRecord(a, s); cudaGraphLaunch(exec, s); cudaEventRecord(b, s); cudaEventSynchronize(b);
        float ms; cudaEventElapsedTime(&ms, a, b); times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(exec); cudaGraphDestroy(graph);
    return times[reps/2];
}

static void time_net(ggml_backend_cuda_context & ctx, const char * name, const std::vector<int> & widths, int spare, int n_slots) {
    const int S = 128, H_k = 16, H_v = 48, L = 48;
    forest f(widths, n_slots, spare);
    net in(S, H_k, H_v, f.n);
    ggml_tensor * whole = dev(ggml_new_tensor_4d(C, GGML_TYPE_F32, S, S*H_v, L, n_slots));
    cudaMemset(whole->data, 0, ggml_nbytes(whole));
    ggml_tensor * parents = ints(f.parents, f.n), * seqs = ints(f.seqs, 3, f.n_seqs);
    const int64_t n_f = S*(H_v + H_k) + H_v;
    ggml_tensor * cache = dev(ggml_new_tensor_3d(C, GGML_TYPE_F32, n_f, 64, L));
    cudaMemset(cache->data, 0, ggml_nbytes(cache));
    std::vector<ggml_tensor *> outs;
    ggml_tensor * out = nullptr;
    for (int l = 0; l < L; ++l) {
        ggml_tensor * t = ggml_gated_delta_net_forest_persist(C, in.q, in.k, in.v, in.g, in.beta, layer_state(whole, l, S, H_v), parents, seqs);
        if (!out) out = dev(t);
        t->data = out->data;
        outs.push_back(t);
    }
    float t[2];
    for (int advance = 0; advance < 2; ++advance) {
        t[advance] = time_graph(ctx, [&] {
            for (int l = 0; l < L; ++l) {
                ggml_cuda_gdn_tree_cache c;
                c.data = (float *) cache->data + l*cache->nb[2]/4; c.stride1 = n_f; c.advance = advance;
                ggml_cuda_op_gated_delta_net_tree_persist(ctx, outs[l], &c);
            }
        });
    }
    std::vector<int32_t> path;
    for (int w : widths) for (int i = 0; i < 5; ++i) path.push_back(i < std::min(w, 4) ? i : -1);
    ggml_tensor * live = view_like(ggml_view_4d(C, whole, S, S*H_v, n_slots, L, whole->nb[1], whole->nb[3], whole->nb[2], 0));
    ggml_tensor * com = ggml_gated_delta_net_forest_commit(C, live, cache, ints(path, 5, f.n_seqs), seqs);
    com->data = live->data;
    const float tc = time_graph(ctx, [&] { ggml_cuda_op_gated_delta_net_tree_commit(ctx, com); });
    printf("%-26s persist %7.3f ms = %5.1f us a layer, advancing %7.3f = %5.1f, commit of all layers %7.3f ms\n", name, t[0], 1000*t[0]/L, t[1], 1000*t[1]/L, tc);
    clear();
}

// one sequence
static void time_tree(ggml_backend_cuda_context & ctx, int n) {
    const int S = 128, H_k = 16, H_v = 48, L = 48;
    forest f({ n }, 1, 0);
    net in(S, H_k, H_v, n);
    ggml_tensor * whole = dev(ggml_new_tensor_4d(C, GGML_TYPE_F32, S, S, H_v, L));
    cudaMemset(whole->data, 0, ggml_nbytes(whole));
    ggml_tensor * parents = ints(f.parents, n);
    const int64_t n_f = S*(H_v + H_k) + H_v;
    ggml_tensor * cache = dev(ggml_new_tensor_3d(C, GGML_TYPE_F32, n_f, n, L));
    cudaMemset(cache->data, 0, ggml_nbytes(cache));
    std::vector<ggml_tensor *> outs;
    ggml_tensor * out = nullptr;
    for (int l = 0; l < L; ++l) {
        ggml_tensor * s = view_like(ggml_view_4d(C, whole, S, S, H_v, 1, whole->nb[1], whole->nb[2], whole->nb[3], l*whole->nb[3]));
        ggml_tensor * t = ggml_gated_delta_net_tree_persist(C, in.q, in.k, in.v, in.g, in.beta, s, parents);
        if (!out) out = dev(t);
        t->data = out->data;
        outs.push_back(t);
    }
    const float t = time_graph(ctx, [&] {
        for (int l = 0; l < L; ++l) {
            ggml_cuda_gdn_tree_cache c;
            c.data = (float *) cache->data + l*cache->nb[2]/4; c.stride1 = n_f; c.stride2 = 0;
            ggml_cuda_op_gated_delta_net_tree_persist(ctx, outs[l], &c);
        }
    });
    std::vector<int32_t> path;
    for (int i = 0; i < 9; ++i) path.push_back(i < std::min(n, 8) ? i : -1);
    ggml_tensor * com = ggml_gated_delta_net_tree_commit(C, whole, cache, ints(path, 9));
    com->data = whole->data;
    const float tc = time_graph(ctx, [&] { ggml_cuda_op_gated_delta_net_tree_commit(ctx, com); });
    const std::vector<float> bits = host(out);
    uint32_t hash = 1;
    for (float x : bits) { uint32_t u; memcpy(&u, &x, 4); hash = hash*31 + u; }
    printf("one tree of %3d            persist %7.3f ms = %5.1f us a layer, commit %7.3f ms, bits %08x\n", n, t, 1000*t/L, tc, hash);
    clear();
}

// what comes before, with the commit of sequences of one column: 48 layers
static void time_conv(ggml_backend_cuda_context & ctx, const char * name, const std::vector<int> & widths, int n_slots) {
    const int S = 128, n_norm = 32, H = 48, d = S*(n_norm + H), L = 48;
    forest f(widths, n_slots, 0);
    ggml_tensor * whole = dev(ggml_new_tensor_4d(C, GGML_TYPE_F32, 3, d, L, n_slots));
    ggml_tensor * w = dev(ggml_new_tensor_3d(C, GGML_TYPE_F32, 4, d, L)), * x = dev(ggml_new_tensor_3d(C, GGML_TYPE_F32, d, f.n, L));
    for (ggml_tensor * t : { whole, w, x }) cudaMemset(t->data, 0, ggml_nbytes(t));
    ggml_tensor * a = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, H, f.n), [&](int64_t) { return nor(); });
    ggml_tensor * b = fill(ggml_new_tensor_2d(C, GGML_TYPE_F32, H, f.n), [&](int64_t) { return nor(); });
    ggml_tensor * bias = fill(ggml_new_tensor_1d(C, GGML_TYPE_F32, H), [&](int64_t) { return nor(); });
    ggml_tensor * parents = ints(f.parents, f.n), * seqs = ints(f.seqs, 3, f.n_seqs);
    std::vector<ggml_cgraph *> graphs;
    for (int l = 0; l < L; ++l) {
        ggml_tensor * window = view_like(ggml_view_3d(C, whole, 3, d, n_slots, whole->nb[1], whole->nb[3], l*whole->nb[2]));
        ggml_tensor * live = view_like(ggml_view_4d(C, whole, 3, d, n_slots, 1, whole->nb[1], whole->nb[3], whole->nb[2], l*whole->nb[2]));
        ggml_tensor * xl = view_like(ggml_view_2d(C, x, d, f.n, x->nb[1], l*x->nb[2])), * wl = view_like(ggml_view_2d(C, w, 4, d, w->nb[1], l*w->nb[2]));
        ggml_tensor * silu = ggml_silu(C, ggml_ssm_conv_forest(C, window, xl, wl, parents, seqs));
        ggml_tensor * heads = ggml_view_3d(C, silu, S, n_norm, f.n, S*4, silu->nb[1], 0);
        ggml_tensor * qk = ggml_scale(C, ggml_rms_norm(C, heads, 1e-6f/S), 1/sqrtf(S));
        ggml_tensor * decay = ggml_mul(C, ggml_softplus(C, ggml_add(C, a, bias)), bias), * beta = ggml_sigmoid(C, b);
        ggml_tensor * commit = ggml_ssm_conv_forest_commit(C, live, xl, nullptr, seqs);
        commit->data = live->data;
        for (ggml_tensor * t : { silu->src[0], silu, qk->src[0], qk, decay->src[0]->src[0], decay->src[0], decay, beta }) dev(t);
        heads->data = silu->data;
        ggml_cgraph * gr = ggml_new_graph_custom(C, 32, false);
        for (ggml_tensor * t : { qk, decay, beta, commit, silu }) ggml_build_forward_expand(gr, t);
        graphs.push_back(gr);
    }
    const float t = time_graph(ctx, [&] {
        for (ggml_cgraph * gr : graphs) {
            int at = 0;
            while (gr->nodes[at]->op != GGML_OP_SSM_CONV_TREE) ++at;
            if (ggml_cuda_fused_delta_net_input(ctx, gr, at) == 0) printf("not fused\n");
        }
    });
    printf("%-26s convolution, norms and gates %7.3f ms = %5.1f us a layer\n", name, t, 1000*t/L);
    clear();
}

int main(int argc, char ** argv) {
    ggml_init_params p = { 64*1024*1024, nullptr, true };
    C = ggml_init(p);
    ggml_backend_cuda_context ctx(0);
    const std::string what = argc > 1 ? argv[1] : "check";
    if (what == "tree") {
        for (int n : { 1, 8, 16, 24, 32, 64 }) { rng.seed(7); time_tree(ctx, n); }
        return 0;
    }
    if (what == "check" || what == "small") {
        const std::vector<std::vector<int>> all = { {1}, {5, 3}, {1, 1, 1, 1, 1}, {16, 0, 1, 17, 0, 6}, {8, 8, 8, 8, 8, 8, 8, 8}, {33, 9, 2}, {60, 30, 4}, {16, 16},
            {2, 4, 3, 1, 2}, {12, 13, 7, 15, 10} };
        for (const auto & widths : all) {
            for (int S : { 16, 32, 64, 128 }) {
                if (what == "small" && (S != 64 || widths.size() > 6)) continue;
                check_net(ctx, S, 2, 6, widths, 0, false, false);
                check_net(ctx, S, 2, 6, widths, 3, true, true);
                check_net(ctx, S, 3, 3, widths, 1, true, true);
                check_net(ctx, S, 1, 4, widths, 1, true, false);
            }
            if (what == "check") check_net(ctx, 128, 16, 48, widths, 2, true, true);
            for (int S : { 32, 64, 128 }) {
                check_conv(ctx, S, 4, 6, widths, 0, false);
                check_conv(ctx, S, 4, 6, widths, 3, true);
            }
        }
        printf("checked; worst %.2f of the tolerance, %d values advanced otherwise than committed\n", worst, n_bits);
        return 0;
    }
    time_conv(ctx, "4 x 1", { 1, 1, 1, 1 }, 8);
    time_conv(ctx, "8 x 1", { 1, 1, 1, 1, 1, 1, 1, 1 }, 8);
    time_conv(ctx, "16 x 1", { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 16);
    time_conv(ctx, "8 x 8", { 8, 8, 8, 8, 8, 8, 8, 8 }, 8);
    time_net(ctx, "8 x 8", { 8, 8, 8, 8, 8, 8, 8, 8 }, 0, 8);
    time_net(ctx, "8 x 1", { 1, 1, 1, 1, 1, 1, 1, 1 }, 0, 8);
    time_net(ctx, "4 x 1", { 1, 1, 1, 1 }, 0, 8);
    time_net(ctx, "8 x 4", { 4, 4, 4, 4, 4, 4, 4, 4 }, 0, 8);
    time_net(ctx, "4 x 16", { 16, 16, 16, 16 }, 0, 8);
    time_net(ctx, "1 x 24", { 24 }, 0, 8);
    time_net(ctx, "2 x 32", { 32, 32 }, 0, 8);
    time_net(ctx, "24 18 10 6 3 1 1 1", { 24, 18, 10, 6, 3, 1, 1, 1 }, 0, 8);
    time_net(ctx, "16 x 4", { 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4 }, 0, 16);
    time_net(ctx, "16 x 1", { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 0, 16);
    time_net(ctx, "8 x 1 of 16 entries", { 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0 }, 0, 16);
}
